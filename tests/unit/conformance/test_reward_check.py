"""The checker of rewards passes what training can use, and names what it cannot."""

import sys
import types
from typing import Any

import pytest

from marl_ray.conformance.extensions.reward import check
from marl_ray.errors import MarlRayError


def constant(prompt: str, answer: str, task: Any) -> float:
    return 0.5


def remembers(prompt: str, answer: str, task: Any, seen: list[str] = []) -> float:  # noqa: B006
    seen.append(answer)
    return float(len(seen))


def crashes(prompt: str, answer: str, task: Any) -> float:
    return float(answer)


def text(prompt: str, answer: str, task: Any) -> str:
    return "good"


def once(prompt: str, answer: str, task: Any, strict: bool = False) -> float:
    return float(answer == task.answer and not strict)


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("checked_rewards")
    for function in (constant, remembers, crashes, text, once):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "checked_rewards", module)


@pytest.mark.parametrize(
    ("name", "failures"),
    [
        ("once", []),
        ("constant", ["differs: every answer was paid 0.5, so nothing is learnt from it"]),
        ("remembers", ["repeats: the answer '56' was paid 1, then 8", "threads: 8 threads at once were paid"]),
        ("crashes", ["numbers: reward: checked_rewards:crashes fails on the answer '' to task 1: ValueError"]),
        (
            "text",
            ["numbers: reward: checked_rewards:text fails on the answer '56' to task 1: ValueError: returned 'good'"],
        ),
    ],
)
def test_a_mistake_is_named(name, failures):
    lines = [f"{each.name}: {each.failure}" for each in check(f"checked_rewards:{name}", {}) if each.failure]
    assert len(lines) == len(failures)
    assert all(line.startswith(failure) for line, failure in zip(lines, failures, strict=True))


def test_settings_are_options():
    lines = [each.failure for each in check("checked_rewards:once", {"strict": True})]
    assert lines == [None, "every answer was paid 0, so nothing is learnt from it", None, None]
    with pytest.raises(
        MarlRayError, match=r"^reward: checked_rewards:once has no option 'strct'; did you mean strict\?$"
    ):
        list(check("checked_rewards:once", {"strct": True}))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("math_answer", {}), ("solved", {}), ("short_answer", {}), ("exact_match", {}), ("llm_judge", {"offline": True})],
)
def test_a_built_in_passes(name, settings):
    assert [str(each) for each in check(name, settings) if each.failure] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_a_reward_of_programs_passes():
    assert [str(each) for each in check("code_tests", {"style": 0.5}) if each.failure] == []
