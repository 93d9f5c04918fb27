"""The demo's story with small teams: the better one is promoted, an untrained one rolled back. `make demo` tells all."""

from pathlib import Path

import pytest
from rich.console import Console
from toy_runs.runs import config
from toy_serving.gateways import write_keys
from toy_serving.sites import running

from marl_ray.config import GatewayConfig, RunConfig, parse_config
from marl_ray.first_steps.demo import RAMP_SETTINGS, decision_lines, play, ramp_untrained, table
from marl_ray.first_steps.steps import ENDPOINT
from marl_ray.serving.asgi import Gateway
from marl_ray.training.single_process import train_alone

EPISODES = 2_000


def train_run(folder: Path, lr: float) -> tuple[RunConfig, str]:
    """A run, and its last best bundle."""
    more = ["train.total_steps=1536", "train.env_copies=16", "hyper.epochs=4", "evaluation.every=0"]
    run = config(*more, f"hyper.lr={lr}")
    train_alone(run, folder)
    return run, str(max(folder.glob("*/bundle"), key=lambda path: int(path.parent.name)))


@pytest.mark.slow
def test_the_demos_good_team_is_promoted_and_its_untrained_one_rolled_back(tmp_path, monkeypatch):
    monkeypatch.setenv("MARL_RAY_API_KEY", "ada")
    monkeypatch.setitem(RAMP_SETTINGS, "outcome_window_s", 1.0)  # its episodes take a few hundredths of a second
    _, ippo = train_run(tmp_path / "ippo", 0.003)
    run, mappo = train_run(tmp_path / "mappo", 0.03)
    arms = {"ippo": {"bundle": ippo}, "mappo": {"bundle": mappo}}
    where = {"database": f"sqlite:///{tmp_path}/experiments.db", "spool": str(tmp_path / "spool")}
    keys = write_keys(tmp_path / "keys.yaml", ada=("admin", "inference", "outcomes"))
    gateway = parse_config(
        GatewayConfig,
        where | {"api_keys": keys, "experiments": [{"name": ENDPOINT, "arms": arms, **RAMP_SETTINGS}]},
    )
    with running(Gateway(gateway, seed=0)) as site:
        good = play(site.url, ENDPOINT, run.env, EPISODES)
        assert good.report["status"] == "promoted", good
        assert min(arm["mean"] for arm in good.report["arms"].values()) > 3.0 and good.episodes < EPISODES
        lines = decision_lines(good)
        assert any("promote mappo" in line and "by gateway: the promotion bound holds" in line for line in lines), lines
        name = ramp_untrained(run, tmp_path, site.url)
        bad = play(site.url, name, run.env, EPISODES)
        assert bad.report["status"] == "rolled_back" and bad.report["arms"]["candidate"]["verdict"] == "worse", bad
        lines = decision_lines(bad)
        assert any("rollback candidate" in line and "harm proven by outcome" in line for line in lines), lines
        console = Console(width=120, record=True)
        console.print(table(bad))
    shown = console.export_text()
    assert f"experiment {name}: rolled_back, {bad.episodes} episodes over HTTP" in shown
    assert any(line.startswith("│ candidate ") and "worse" in line for line in shown.splitlines()), shown
