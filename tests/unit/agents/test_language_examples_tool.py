"""The example of docs/language_teams/own_parts.md: a tool from a function, and one from a class, in an environment."""

import sys

from marl_ray.config import EnvConfig
from marl_ray.envs.registry import make_env

EXAMPLE = '''
"""Tools for questions about prices."""

from marl_ray.agents.errors import ToolError


def price(item: str, count: int = 1, *, discount: float = 0.0) -> str:
    """Gives the price of some items in the shop."""
    prices = {"apple": 0.5, "pear": 0.75}
    if item not in prices:
        raise ToolError(f"The shop has no {item}, only {', '.join(prices)}.")
    return f"{prices[item] * count * (1 - discount):.2f}"


class Stock:
    """Tells how many pieces of an item are in stock."""

    def __init__(self, path: str):
        with open(path) as lines:
            self.counts = dict(line.split() for line in lines)

    def __call__(self, item: str) -> str:
        return self.counts.get(item, "0")
'''


def test_own_tools_by_path(tmp_path, monkeypatch):
    (tmp_path / "shop_tools.py").write_text(EXAMPLE)
    (tmp_path / "stock.txt").write_text("apple 7\npear 0\n")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "What do four apples cost?", "answer": "1.80"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    kwargs = {
        "tools": {
            "shop_tools:price": {"discount": 0.1},
            "shop_tools:Stock": {"path": str(tmp_path / "stock.txt")},
        },
        "data": str(tmp_path / "questions.jsonl"),
        "held_out": 0.0,
    }
    env = make_env(EnvConfig(id="react", kwargs=kwargs))
    env.reset(seed=0)
    assert 'price {"item": string, "count"?: integer}: Gives the price' in env.observe("agent")
    assert 'stock {"item": string}: Tells how many' in env.observe("agent")
    for action, arguments, observation in [
        ("price", '{"item": "apple", "count": 4}', "Observation: 1.80"),
        ("price", '{"item": "plum"}', "Observation: The shop has no plum, only apple, pear."),
        ("stock", '{"item": "apple"}', "Observation: 7"),
    ]:
        env.step(f"Action: {action}\nInput: {arguments}")
        assert observation in env.observe("agent")
    env.step('Action: answer\nInput: {"answer": "1.8"}')
    assert env.infos["agent"]["solved"]
    assert env.infos["agent"]["metrics"] == {
        "pass": 1.0,
        "answered": 1.0,
        "calls": 3.0,
        "failed_actions": 1.0,
        "turns": 4.0,
    }
    sys.modules.pop("shop_tools")
