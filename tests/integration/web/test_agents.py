"""Benchmarks in a real Chromium: what agents do, what it costs, and what a fault leaves of it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from servers.little_site import little_site, web_record
from servers.playwright_chromium import AGENT, element, no_chromium_stays
from toy_models.tokens import tiny
from toy_serving.gateways import LINEAGE, gateway_config, make_bundle, serving

import marl_ray
from marl_ray.cli import main
from marl_ray.config import RunConfig, load_config
from marl_ray.envs.web.miniwob_elements import MiniWobElements
from marl_ray.evaluation.web_agents.protocol import WebAnswer, WebTurn
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.serving.client.play import play_episode
from marl_ray.training.single_process import train_alone

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def browsers() -> list[str]:
    return [child.name() for child in psutil.Process().children(recursive=True) if "chrom" in child.name()]


@pytest.fixture
def first_element(tmp_path: Path) -> str:
    """A bundle that clicks the best match of the task."""
    env = MiniWobElements(tasks=["click-test"])
    spaces = env.observation_space(AGENT), env.action_space(AGENT)
    return make_bundle(tmp_path / "bundle", 0, spaces[0], (AGENT,), spaces[1])


async def test_a_gateway_serves_a_trained_policy_that_drives_the_browser(tmp_path):
    run = load_config(
        RunConfig,
        Path(__file__).parents[3] / "jobs/configs/miniwob_click.yaml",
        ["env.kwargs.tasks=[click-test]", "train.total_steps=512", "resources.workers=1", "checkpoint.every=1"],
    )
    rows = train_alone(run, tmp_path / "run")
    assert rows[-1]["return"] > 0.9
    assert browsers() == [], "a run leaves no browser"
    bundle = str(next((tmp_path / "run").glob(f"{len(rows)}/**/bundle.json")).parent)
    config = gateway_config(dict.fromkeys(("one", "four"), bundle), tmp_path / "experiments.db")
    env = MiniWobElements(tasks=["click-test"], max_steps=8)

    async with serving(config) as (client, _):
        assert (
            np.mean([(await play_episode(client, env, f"session-{k}", k, "exp")).episode_return for k in range(20)])
            > 0.8
        )
    env.close()
    assert browsers() == [], "no environment is open"


def test_an_actor_critic_is_measured_and_a_second_call_plays_nothing_anew(tmp_path, first_element, capsys):
    arguments = [
        "evaluate",
        "--benchmark",
        "miniwob",
        "--policy",
        first_element,
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    arguments += ["--env", "tasks=[click-test, focus-text]", "--env", "held_out=2"]
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code
        assert "4 of 4 episodes solved" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert sorted(row["task_id"] for row in rows) == ["click-test.0", "click-test.1", "focus-text.0", "focus-text.1"]
    assert {row["ending"] for row in rows} == {"page_ended"}
    assert "| click-test | 2 | 2 | 1.0 |" in (tmp_path / "out/report.md").read_text()


def test_a_language_model_is_measured_by_its_own_tokens(tmp_path):
    policy = plain_copy(tiny(critic=False, signals=0, context=2048))
    bundle = save_token_bundle(tmp_path / "bundle", {AGENT: "p"}, {"p": policy}, LINEAGE)
    env = {"tasks": ["click-test"], "held_out": 2, "max_steps": 2}
    reports = [
        marl_ray.evaluate("miniwob", bundle, env=env, max_tokens=5, workers=workers, out=tmp_path / str(workers)).report
        for workers in (1, 2)
    ]
    assert reports[0]["endings"].keys() == {"step_limit"}
    assert 2 <= reports[0]["all"]["tokens"] <= 10
    assert [report["all"]["tokens"] for report in reports] == [reports[0]["all"]["tokens"]] * 2


class Hanger:
    """Clicks what makes the page hang."""

    def manifest(self) -> Mapping[str, Any]:
        return {"agent": "who clicks Hang"}

    def act(self, turns: Sequence[WebTurn]) -> list[WebAnswer]:
        return [WebAnswer(f"click [{element(turn.env, 'button .Hang.')}]", tokens=7) for turn in turns]


def test_an_episode_that_a_fault_ends_counts_with_what_it_cost(tmp_path):
    with little_site() as site:
        records = [
            {**web_record("/hang", ["string_match"], reference_answers={"exact_match": "a"}), "task_id": k}
            for k in (0, 1)
        ]
        (tmp_path / "tasks.json").write_text(json.dumps(records))
        env = {"data": str(tmp_path / "tasks.json"), "sites": {"shopping": site.url}, "held_out": 0.0, "step_s": 2.0}
        result = marl_ray.evaluate(
            "webarena", f"{__name__}:Hanger", env=env, split="train", workers=2, out=tmp_path / "out"
        )
    fault = result.report["endings"]["page_fault"]
    assert (fault["episodes"], fault["solved"], fault["actions"], fault["tokens"], fault["calls"]) == (2, 0, 1, 7, 1)
    assert 2 <= fault["seconds"] < 20
    assert result.scores["official"]["pass@1"]["value"] == 0.0
