"""The HTTP API against requests made to break it: hostile values, names, headers and bodies, over real HTTP."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from toy_serving.gateways import SEES
from toy_serving.sites import TEXTS, client, site, text_site

from marl_ray.serving.http.messages import Request, RequestError

__all__ = ["client", "site", "text_site"]
DEEP = b"[" * 900 + b"]" * 900
"""This depth of JSON is still read; nothing as deep is written."""
HOSTILE = [
    *(b'"a\\u0000b"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"', b'"\xff"', b'"\\u202e"', b'""'),
    *(b"9" * 400, b"-9223372036854775808", b"18446744073709551615", b"1e308", b"1e999", b"NaN", b"Infinity"),
    *(b"null", b"true", b"[]", b"{}", b"[[1],[1,2],3]", b'{"a":{"b":1}}', b'["1","2"]', b"[null]", DEEP),
    *(b'{"\\u0000":1}', b'{"a: b":1}', b'{"":[[]]}', b'"' + b"x" * 5000 + b'"'),
    *(b'{"agent_0":%s}' % value for value in (DEEP, b'"abc"', b'{"a":1}', b"[1e308,1,1]", b"[1,[2],3]")),
]
"""Values, as JSON or nearly, for any field."""
BODIES = [
    b"",
    b"\0",
    b"null",
    b"[]",
    b'"x"',
    b"1",
    b"{",
    b"{}{}",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe",
    b'{"\\ud800":1}',
    b'{"a":' * 2000,
    DEEP,
]
ACT = {"experiment": "exp", "session_id": "h", "observations": SEES}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/act": ACT | {"action_masks": {}, "cluster_id": "c", "mode": "greedy"},
    "/batch": {"requests": [ACT]},
    "/generate": {"experiment": "exp", "session_id": "h", "prompt": "p", "max_tokens": 1, "temperature": 1}
    | dict.fromkeys(("agent", "cluster_id", "top_p", "top_k", "stop", "seed", "stream")),
    "/v1/chat/completions": {"model": "exp", "messages": [{"role": "user", "content": "p"}], "max_tokens": 1}
    | dict.fromkeys(
        ("user", "stop", "seed", "stream", "n", "tools", "logit_bias", "max_completion_tokens", "logprobs")
    ),
    "/v1/outcomes": {"experiment": "exp", "session_id": "known-3", "value": 1, "metrics": {}},
    "/v1/experiments": {"name": "hostile", "arms": {"a": {"bundle": "zero"}}, "reason": "r"}
    | dict.fromkeys(
        ("endpoint", "salt", "layer", "guardrails", "alpha", "block_s", "stages", "breaker", "layer_share")
    ),
    "/v1/experiments/other/rollback": {"reason": "r", "arm": "four", "epoch": 99},
    "/v1/experiments/other/promote": {"reason": "r", "arm": "four", "epoch": 99},
}


def assert_refused_or_done(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        (error,) = answer.json().values()
        openais = {"type", "code", "param"}  # on its route
        assert set(error) - openais == {"field", "message"} and "\n" not in error["message"]


@pytest.mark.parametrize("path", REQUESTS)
def test_hostile_values_are_refused_by_name(path, client, text_site):
    good = REQUESTS[path]
    if path in TEXTS:
        client.base_url = text_site.url
    for field in good:
        start, _, end = json.dumps(good | {field: "@"}).encode().partition(b'"@"')
        for number, value in enumerate(HOSTILE):
            # An experiment that could be made is there, so the next one needs another name.
            body = (start + value + end).replace(b"hostile", f"{field}-{number}".encode())
            assert_refused_or_done(client.post(path, content=body))
            if path == "/v1/act":
                assert_refused_or_done(client.post("/batch", content=b'{"requests":[' + body + b"]}"))
    for body in BODIES:
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "body")


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/act", {"session_id": "a\0b"}, "session_id"),
        ("/v1/act", {"session_id": "a\x1b"}, "session_id"),
        ("/v1/act", {"cluster_id": "a\0b"}, "cluster_id"),
        ("/v1/outcomes", {"session_id": "a\0b"}, "session_id"),
        ("/v1/outcomes", {"metrics": {"a\0b": 1}}, "metrics"),
        ("/v1/outcomes", {"metrics": {"": 1}}, "metrics"),
        ("/v1/outcomes", {"metrics": {"x" * 101: 1}}, "metrics"),
        ("/v1/outcomes", {"metrics": {"outcome": 1}}, "metrics"),
        ("/v1/experiments/other/promote", {"reason": "a\0b"}, "reason"),
        ("/v1/experiments/other/promote", {"reason": "x" * 1001}, "reason"),
        ("/v1/experiments/other/promote", {"arm": []}, "arm"),
        ("/v1/experiments/other/promote", {"arm": {}}, "arm"),
    ],
)
def test_what_the_database_could_not_keep_never_reaches_it(path, change, field, client):
    answer = client.post(path, json=REQUESTS[path] | change)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"salt": "a\0b"}, "body"),
        ({"layer": "a\0b"}, "body"),
        ({"guardrails": [{"name": "\0", "better": "lower"}]}, "body"),
        ({"arms": {"a": {"bundle": "a\0b"}}}, "body"),
        ({"arms": {"a\0b": {"bundle": "zero"}}}, "arms"),
        ({"arms": {"a\nb": {"bundle": "zero"}}}, "arms"),
        ({"arms": {"": {"bundle": "zero"}}}, "arms"),
        ({"arms": {"x" * 101: {"bundle": "zero"}}}, "arms"),
        ({"arms": {"a": {"bundle": "zero", "weight": "Infinity"}}}, "arms.a.weight"),
        ({"arms": {"a": {"bundle": "zero", "weight": 1.7e308}, "b": {"bundle": "two"}}}, "arms"),
        ({"arms": {"a": {"bundle": "zero", "weight": 5e-324}, "b": {"bundle": "two"}}}, "arms"),
        ({"alpha": 5e-324}, "alpha"),
        ({"alpha_rollback": 5e-324}, "alpha_rollback"),
        ({"guardrails": [{"name": "cost", "alpha": 5e-324}]}, "guardrails"),
        ({"strategy": "gradual", "stages": [5e-324, 1]}, "stages"),
        ({"randomize": "switchback", "block_s": 5e-324}, "block_s"),
    ],
)
def test_experiments_that_nobody_could_run_are_not_made(change, field, client):
    made = {"name": "never", "arms": {"a": {"bundle": "zero"}, "b": {"bundle": "two"}}, "reason": "r"} | change
    answer = client.post("/v1/experiments", json=made)
    named = answer.json()["error"]["field"]
    assert answer.status_code == 400 and f"{named}.".startswith(f"{field}."), named
    assert client.get("/v1/experiments/never").status_code == 404


@pytest.mark.parametrize("name", ["%00", "%FF", "%ED%A0%80", "%", "%zz", "a;b", "%2565xp", "%41" * 9000, "x" * 60_000])
def test_names_in_paths_may_be_anything(name, client):
    for path, status in (
        ("/v1/experiments/{}", 404),
        ("/v1/experiments/{}/audit", 404),
        ("/v1/{}", 404),
        ("/ui/experiments/{}", 404),
    ):
        target = httpx.URL(client.base_url).copy_with(raw_path=path.format(name).encode())
        answer = client.get(target)
        assert_refused_or_done(answer)
        assert answer.status_code == status
    answer = client.post(httpx.URL(client.base_url).copy_with(raw_path=f"/models/{name}:1/load".encode()))
    assert_refused_or_done(answer)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-session-id", b"\xed\xa0\x80")],
        [(b"x-session-id", b"")],
        [(b"x-session-id", b"a" * 300)],
        [(b"x-session-id", b"a"), (b"x-session-id", b"b")],
        [(b"x-session-id", b"a"), (b"x-arm", b"\xff")],
        [(b"x-session-id", b"a"), (b"x-request-id", b"\xff")],
        [(b"x-session-id", b"a"), (b"authorization", b"Bearer \xff")],
        *([(b"x-request-timeout-seconds", value)] for value in (b"nan", b"-1", b"", b"\xb2", b"9" * 5000)),
    ],
)
def test_headers_may_be_anything(headers, client):
    assert_refused_or_done(client.post("/v1/act", json={"experiment": "exp", "observations": SEES}, headers=headers))


@pytest.mark.parametrize("length", [b"9" * 5000, b"9" * 30, b"11"])
def test_a_body_that_is_announced_too_long_is_not_waited_for(length):
    async def receive() -> Any:
        raise AssertionError("read")

    with pytest.raises(RequestError) as refused:
        asyncio.run(Request({"path": "/", "headers": [(b"content-length", length)]}, receive, 10).body())
    assert refused.value.status == 413
