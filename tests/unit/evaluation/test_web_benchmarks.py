"""Benchmarks in a browser without a browser: what is refused, and the report."""

import json
from typing import Any

import pytest
from toy_serving.gateways import make_bundle

import marl_ray
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import benchmark
from marl_ray.evaluation.scoring.report import aggregate
from marl_ray.evaluation.web_agents.reporting import web_lines, web_markdown, web_report

MINIWOB = {"benchmark": "miniwob", "policy": "random"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"policy": None}, "policy: expected a bundle, expert, random or package.module:NAME"),
    ({"policy": "nobody"}, "bundle 'nobody' has no readable bundle.json"),
    ({"policy": "json:loads"}, "policy: json:loads rejected {}"),
    (
        {"policy": "collections:UserList"},
        r"policy: collections:UserList returned UserList, .* no manifest\(\)",
    ),
    ({"policy": "expert", "greedy": True}, "greedy: expected with a bundle"),
    ({"agent": "agent"}, "agent: expected with a bundle"),
    ({"temperature": 0.5}, "temperature: expected with a bundle"),
    ({"split": "dev"}, "split: expected one of test, train, all, got 'dev'"),
    ({"k": [3], "env": {"tasks": ["click-test"]}}, "k: problem 'click-test.[0-9]+' has only 1 sample, not 3"),
    ({"sha256": "any"}, "sha256: miniwob has none: it is played in a browser, whose options are `env`"),
    ({"prompt": "{prompt}"}, "prompt: miniwob has none"),
    ({"env": {"sites": {}}}, "^env.sites: miniwob has no such argument; "),
    ({"env": {"max_step": 3}}, "^env.max_step: miniwob has no such argument; did you mean max_steps"),
    ({"env": {"held": 3}}, "^env.held: miniwob has no such argument; did you mean held_out"),
    ({"env": {"size": [9, 9]}}, "^env.size: miniwob has no such argument; "),
    ({"env": {"max_steps": 0}}, "^env: miniwob rejected .* .max_steps=0, expected more than 0"),
    ({"env": {"tasks": ["click-tset"]}}, "env: miniwob rejected .* 'click-tset' is no page; did you mean click-test"),
    ({"env": {"tasks": ["use"]}}, "'use' is no page; did you mean use-autocomplete or use-autocomplete-nodelay or"),
    ({"env": {"tasks": []}}, "tasks: expected at least one page, got none"),
    ({"env": {"cost": ["calls"]}}, "env: cost is set by the evaluation"),
    ({"env": {"held_out": 0}}, "split: test has no tasks"),
    ({"benchmark": "webarena", "env": {"data": "nowhere.json", "sites": {"gitlab": "http://g.test"}}}, "nowhere.json"),
    ({"benchmark": "humaneval", "env": {"a": 1}}, "env: expected with a benchmark in a browser"),
    ({"min_level": "limits"}, "min_level: miniwob has none"),
    ({"benchmark": "humaneval", "min_level": "path"}, "min_level: expected limits, paths or namespaces, got 'path'"),
    ({"benchmark": "humaneval", "max_steps": 9}, "max_steps: expected with .* a browser, or with `episodes`"),
    ({"benchmark": "humaneval", "num_sample": 2}, r"num_sample: is unknown; did you mean num_samples"),
    (
        {"benchmark": "humaneval", "policy": None, "samples": "a", "tracking_uri": "b"},
        "tracking_uri: expected with a policy",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_one_line(tmp_path, arguments, message):
    with pytest.raises(MarlRayError, match=message) as raised:
        marl_ray.evaluate(**{**MINIWOB, "out": tmp_path, **arguments})
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_of_another_environment_is_refused(tmp_path):
    with pytest.raises(
        MarlRayError,
        match=r"^policy: expected language models, or actor-critics of miniwob_elements, not those of None$",
    ):
        marl_ray.evaluate("miniwob", make_bundle(tmp_path, 0, agents=("agent",)))


def test_runs_measure_no_benchmark_in_a_browser():
    with pytest.raises(MarlRayError, match=r"^benchmark: 'webarena' is of type WebBenchmark, expected a Benchmark$"):
        benchmark("webarena")


def row(task: str, sample: int, ending: str, passed: bool, seconds: float) -> dict[str, Any]:
    verdict = {"passed": passed, "result": "passed" if passed else f"fail:{ending}", "flags": [], "level": ""}
    return {
        "what": "sample",
        "task_id": task,
        "sample": sample,
        "group": task.partition(".")[0],
        "official": verdict,
        "suspected_hack": False,
        "ending": ending,
        "score": float(passed),
        "actions": 2,
        "cost": {"tokens": 10.0, "calls": 2.0, "seconds": seconds},
    }


def test_the_report_counts_endings_and_what_they_cost(tmp_path):
    rows = [
        row("a.0", 0, "page_ended", True, 1.0),
        row("a.0", 1, "page_fault", False, 5.0),
        row("b.0", 0, "page_ended", False, 3.0),
        row("b.0", 1, "page_ended", False, 1.0),
    ]
    report = web_report({"variant": "web"}, ["a.0", "a.0", "b.0", "b.0"], rows, (1, 2))
    scores = report["scores"]["official"]
    assert (scores["pass@1"]["value"], scores["pass@2"]["value"]) == (0.25, 0.5)
    fault = report["endings"]["page_fault"]
    assert fault == {"episodes": 1, "solved": 0, "actions": 2, "tokens": 10, "calls": 2, "seconds": 5}
    assert (report["all"]["episodes"], report["all"]["solved"], report["all"]["seconds"]) == (4, 1, 2.5)
    assert {name: part["solved"] for name, part in report["groups"].items()} == {"a": 1, "b": 0}
    assert "  page_fault        1, 0 solved; 2.0 actions, 10 tokens, 5.0 s" in web_lines(report)
    assert "| page_fault | 1 | 0 | 2.0 | 10 | 5.00 |" in web_markdown(report)
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert aggregate({tmp_path: 1.0}, "pass@2", "official")[0].value == 0.5
