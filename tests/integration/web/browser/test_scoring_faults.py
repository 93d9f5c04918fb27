"""Judges and shops that fail while an episode is scored, and an agent that cheats: each has a defined result."""

import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers.http_server import serving_http
from servers.little_site import web_record
from servers.playwright_chromium import AGENT, no_chromium_stays

from marl_ray.envs.web.webarena.environment import WebArena

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow
AUTHOR = "func:shopping_get_sku_latest_review_author('B1')"
RATING = "func:shopping_get_sku_latest_review_rating('B1')"
REVIEWS = [{"nickname": "Ada", "ratings": [{"percent": 20}]}, {"nickname": "Bo", "ratings": [{"percent": 80}]}]


def page_check(locator: str, *texts: str, url: str = "last") -> dict[str, Any]:
    return {"program_html": [{"url": url, "locator": locator, "required_contents": {"must_include": list(texts)}}]}


def ending(folder: Path, url: str, types: list[str], *actions: str, judge: str | None = None, **checks: Any) -> Any:
    """The ending of an episode with this task, whether it is solved, and its costs."""
    path = folder / "tasks.json"
    path.write_text(json.dumps([web_record("/", types, **checks)]))
    kwargs: dict[str, Any] = {
        "sites": {"shopping": url},
        "held_out": 0.0,
        "step_s": 10.0,
        "cost": ["calls"],
        "judge": judge,
    }
    env = WebArena(str(path), **kwargs)  # Chromium stays for the next test
    env.reset(seed=0)
    for action in actions:
        env.step(action)
    infos = env.infos[AGENT]
    return infos["ending"], infos["solved"], infos["cost"]


class FailingJudge:
    """A judge whose model is not there."""

    def same_answer(self, answer: str, reference: str, question: str) -> float:
        raise ConnectionError("no model\nhere")

    same_reason = same_answer


def test_a_judge_that_fails_ends_the_episode_and_not_the_run(tmp_path, site):
    references = {"reference_answers": {"fuzzy_match": ["done"]}}
    judge = f"{__name__}:FailingJudge"
    result = ending(tmp_path, site.url, ["string_match"], "stop [done]", judge=judge, **references)
    assert result == ("site_fault", False, (1.0,))


@pytest.mark.parametrize(
    ("reviews", "locator", "text", "result"),
    [
        (REVIEWS, AUTHOR, "Bo", ("stopped", True)),
        (REVIEWS, RATING, "80", ("stopped", True)),
        (REVIEWS, AUTHOR, "Ada", ("stopped", False)),
        ([], AUTHOR, "Bo", ("stopped", False)),
        ([{"nickname": "Bo"}], RATING, "80", ("site_fault", False)),
        (["Bo"], AUTHOR, "Bo", ("site_fault", False)),
        ({"message": "wrong"}, AUTHOR, "Bo", ("site_fault", False)),
        (7, AUTHOR, "Bo", ("site_fault", False)),
    ],
)
def test_whatever_the_api_of_a_shop_says_has_a_result(tmp_path, reviews, locator, text, result):
    with _shop(reviews) as url:
        *scored, cost = ending(tmp_path, url, ["program_html"], "stop", **page_check(locator, text))
    assert (*scored, cost) == (*result, (1.0,))


def test_a_page_that_the_agent_writes_itself_scores_nothing(tmp_path, site):
    check = page_check("", "Blue chair")
    assert ending(tmp_path, site.url, ["program_html"], f"goto [{site.url}/chair]", "stop", **check)[1]
    for scheme in ("data:text/html,", "DATA:text/html,", "javascript:document.body.innerHTML=", "about:"):
        result = ending(tmp_path, site.url, ["program_html"], f"goto [{scheme}'Blue chair']", "stop", **check)
        assert result == ("stopped", False, (1.0,))


def test_a_page_cannot_make_a_prompt_as_long_as_it_likes(tmp_path, site):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([web_record("/", ["string_match"], reference_answers={"exact_match": "done"})]))
    long = "() => { history.pushState(0, '', '/' + 'x'.repeat(1e5)); document.title = 'y'.repeat(1e5); }"
    env = WebArena(str(path), sites={"shopping": site.url}, held_out=0.0)
    env.reset(seed=0)
    assert env.session is not None
    env.session.call(env.session.page.evaluate(long), "writing long texts")
    env.step("scroll [up]")
    prompt = env.observe(AGENT)
    assert len(prompt) < 10_000
    assert "'Chair'" in prompt, "a long title leaves no room for the page"
    env.step("stop [done]")


@contextmanager
def _shop(reviews: Any) -> Iterator[str]:
    """The base URL of a shop whose API says this of every product's reviews."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = json.dumps(reviews if self.path.endswith("/reviews") else "token").encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler) as url:
        yield url
