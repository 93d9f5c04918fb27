"""A run that is paid by a judge over HTTP, and one that continues without it."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from servers.http_server import serving_http

from marl_ray.config import RunConfig
from marl_ray.config.load import parse_config
from marl_ray.errors import MarlRayError
from marl_ray.training.single_process import train_alone


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A server that grades answers with a 7 in them, and its address; the prompts that it read."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    prompts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompts.append(body["messages"][0]["content"])
            answer = prompts[-1].partition("ANSWER\n")[2].partition("\n===")[0]
            text = f"Fine.\nGRADE: {10 if '7' in answer else 2}"
            usage = {"prompt_tokens": 90, "completion_tokens": 10}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode())

        def log_message(self, *_: object) -> None: ...

    with serving_http(Handler) as url:
        yield f"{url}/v1", prompts


def train(**options: Any) -> list[dict[str, Any]]:
    run = {
        "name": "judged",
        "algorithm": "rloo",
        "env": {"id": "math", "kwargs": {"levels": [1], "reward": {"llm_judge": {"model": "m", **options}}}},
        "team": {"solver": {"model": {"preset": "tiny-0.2m", "context": 64}, "generation": {"max_tokens": 4}}},
        "train": {"total_steps": 32, "env_copies": 16, "horizon": 1, "group_size": 8},
    }
    return train_alone(parse_config(RunConfig, run))


def test_a_judge_pays_and_its_cost_is_a_metric(judge, tmp_path):
    url, prompts = judge
    rows = train(url=url, cache=str(tmp_path / "judge.sqlite"))
    for row in rows:
        assert 0.2 <= row["solver/reward"] <= 1.0 and row["env/judge_failed"] == 0.0
        assert row["env/judge_calls"] + row["env/judge_cached"] == 1.0
        assert row["env/judge_cost"] == pytest.approx(100 * row["env/judge_calls"])
    assert len(prompts) == round(16 * sum(row["env/judge_calls"] for row in rows))
    again = train(url=url, cache=str(tmp_path / "judge.sqlite"))
    assert [row["solver/reward"] for row in again] == [row["solver/reward"] for row in rows]
    assert all(row["env/judge_cached"] == 1.0 for row in again)


def test_without_a_judge_a_run_goes_on_for_a_while_and_ends_by_name():
    url = "http://127.0.0.1:9/v1"
    rows = train(url=url, retries=0, fallback=0.25)
    assert all((row["solver/reward"], row["env/judge_failed"]) == (0.25, 1.0) for row in rows)
    with pytest.raises(
        MarlRayError, match=r"environment math, copy \d+, agent solver: llm_judge: .* \d+ times in a row"
    ):
        train(url=url, retries=0, max_failures=9)
