"""Requests of people to a gateway over HTTP, to read and change its experiments."""

import os
import re
import time
from collections.abc import Iterator

import httpx

from marl_ray.config.base import NAME_PATTERN, PATTERNS
from marl_ray.deadlines.http_client import DeadlineClient, check_header_secret
from marl_ray.errors import MarlRayError, one_line
from marl_ray.experiments.lifecycle import FINAL_STATUSES
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.serving.administration.answers import check_answer

KEY_VARIABLE = "MARL_RAY_API_KEY"
"""Environment variable with the admin key."""
GATEWAY_VARIABLE = "MARL_RAY_GATEWAY"
"""Environment variable with the gateway's address."""
EXAMPLE_URL = "http://127.0.0.1:8000"
"""Address of a gateway that Serve runs with its defaults on this machine."""
REQUEST_S = 30.0
"""Seconds that one request to the gateway may take."""
MAX_SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error shows of an answer that is no gateway's."""
WATCH_S = 2.0
"""Seconds between requests of a watched experiment, which a person reads."""


def request_json(url: str, path: str, body: JsonObject | None = None) -> JsonObject:
    """Return the JSON answer to a GET, or to a POST of `body`.

    Raises MarlRayError for a URL that is none, and with the gateway's own words if it refuses.
    """
    remedy = f" (--url or {GATEWAY_VARIABLE} names another address)"
    with DeadlineClient(base_url=gateway_url(url, remedy), timeout=REQUEST_S, headers=key_headers()) as client:
        return request_json_with(client, path, body, remedy)


def experiment_path(name: str, *parts: str) -> str:
    """Return the path of an experiment, or of a part of it such as `audit`.

    Raises MarlRayError for a text that can be no experiment's name, such as an empty one.
    """
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise MarlRayError(f"experiment {name!r}: {PATTERNS[NAME_PATTERN]}")
    return "/".join(("/v1/experiments", name, *parts))


def gateway_url(url: str, remedy: str = "") -> httpx.URL:
    """Return the address of a gateway. Raises MarlRayError, which ends with `remedy`, if the text is no URL."""
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise MarlRayError(f"gateway {url!r}: expected an address such as {EXAMPLE_URL}{remedy}") from error


def key_headers(key: str | None = None) -> dict[str, str]:
    """Return the header with the API key.

    The key is the given one, else that of MARL_RAY_API_KEY. Without either there is no header. Raises MarlRayError, which
    does not show the key, for one with a character that a header cannot hold.
    """
    secret = key or os.environ.get(KEY_VARIABLE)
    if not secret:
        return {}
    return {"authorization": f"Bearer {check_header_secret(secret, 'key' if key else KEY_VARIABLE)}"}


def request_json_with(
    client: DeadlineClient, path: str, body: JsonMapping | None = None, remedy: str = ""
) -> JsonObject:
    """Return the JSON answer that `request_json` gives, over a client's connections. `remedy` ends the error of no answer.

    Raises MarlRayError if the gateway does not answer, or refuses.
    """
    try:
        answer = client.get(path) if body is None else client.post(path, json=body)
    except httpx.UnsupportedProtocol as error:
        raise MarlRayError(
            f"gateway {str(client.base_url)!r}: expected an address such as {EXAMPLE_URL}{remedy}"
        ) from error
    except httpx.HTTPError as error:
        raise MarlRayError(f"gateway {client.base_url} does not answer: {one_line(error)}{remedy}") from error
    return read_answer(answer)


def read_answer(answer: httpx.Response) -> JsonObject:
    """Return the JSON object of a gateway's answer.

    Raises MarlRayError with the gateway's own words if it refuses, and with the key that is wrong if the answer is none
    of a gateway's.
    """
    path = answer.request.url.path
    if answer.status_code not in (200, 201):
        try:
            refusal = answer.json()["error"]
            text = f"{refusal['field'] or 'request'}: {refusal['message']}"
        except (ValueError, KeyError, TypeError):
            text = _shorten(answer.text)
        has_key = "authorization" in answer.request.headers
        key_source = f"the key comes from {KEY_VARIABLE}" if has_key else f"{KEY_VARIABLE} is not set"
        hint = f" ({key_source})" if answer.status_code in (401, 403) else ""
        raise MarlRayError(f"gateway refused {path} with {answer.status_code}: {text}{hint}")
    try:
        data = answer.json()
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise MarlRayError(f"gateway {answer.request.url}: expected a JSON object, got {_shorten(answer.text)!r}")
    try:
        check_answer(answer.request.method, path, data)
    except MarlRayError as error:
        raise MarlRayError(
            f"gateway {answer.request.url}: expected a gateway's answer, got {_shorten(answer.text)!r}: {error}"
        ) from error
    return data


def _shorten(text: str) -> str:
    """Return the beginning of a text in one line."""
    return " ".join(text.split())[:MAX_SHOWN_CHARACTERS]


def deploy_bundle(
    url: str,
    bundle: str,
    strategy: str,
    endpoint: str | None,
    options: JsonObject,
    reason: str,
    allow_rolled_back: bool = False,
) -> JsonObject:
    """Start an experiment with the bundle against the arm that serves the endpoint now.

    The bundle is the arm `candidate`, the other is `production`. If nothing serves there, the bundle serves alone.
    An experiment of one arm that is open there ends when the new one begins. `allow_rolled_back` accepts bundles, that of
    `production` too, whose weights another experiment has rolled back. Returns the new experiment's report. Raises
    MarlRayError, and changes nothing, if the gateway cannot load the bundle, or if an experiment of several arms is still
    open at the endpoint.
    """
    arm = {"bundle": bundle} | ({"allow_rolled_back": True} if allow_rolled_back else {})
    endpoints = request_json(url, "/v1/endpoints")["endpoints"]
    if endpoint is None:
        if len(endpoints) != 1:
            raise MarlRayError(f"endpoint: expected one of {', '.join(endpoints) or 'none yet'}, or a new name")
        endpoint = next(iter(endpoints))
    earlier = endpoints.get(endpoint)
    if earlier is None or earlier["production"] is None:
        return request_json(
            url, "/v1/experiments", {"name": endpoint, "arms": {"production": arm}} | options | {"reason": reason}
        )
    current = request_json(url, experiment_path(earlier["experiments"][0]))
    production = _production_arm(url, earlier["production"])
    if allow_rolled_back and "bundle" in production:  # it serves now, whatever became of its weights elsewhere
        production["allow_rolled_back"] = True
    arms = {"production": production, "candidate": arm}
    number = len(earlier["experiments"]) + 1
    config = {"name": f"{endpoint}-{number}", "endpoint": endpoint, "arms": arms, "strategy": strategy}
    # An experiment of one arm compares nothing, so its end disturbs nothing.
    has_one_arm = current["status"] not in FINAL_STATUSES and len(current["arms"]) == 1
    succession = {"succeeds": current["name"]} if has_one_arm else {}
    return request_json(url, "/v1/experiments", config | options | succession | {"reason": reason})


def _production_arm(url: str, production: JsonObject) -> JsonObject:
    """Return the bundle that serves an endpoint, as an arm of the next experiment."""
    config = request_json(url, experiment_path(production["experiment"]))["config"]["arms"][production["arm"]]
    if config["url"] is None:
        return {"bundle": production["bundle"]}
    return {name: config[name] for name in ("url", "model", "api_key_env", "deadline_s", "price")}


def report_lines(report: JsonObject) -> list[str]:
    """Format an experiment as a few lines of text."""
    progress = f"{report['strategy']} stage {report['stage'] + 1}, epoch {report['epoch']}"
    rows = [f"{report['name']}: {report['status']}, {progress}"]
    decision = report["decision"]
    rows += [
        f"  next: {decision['step'].replace('_', ' ')} {decision['arm'] or ''}".rstrip() + f", {decision['reason']}"
    ]
    counts = " ".join(f"{word:>9}" for word in ("exposed", "in window", "judged", "reporting"))
    rows += [f"  {'arm':<16} {'traffic':>8} {counts}  {'mean':>9}  against control"]
    for name, arm in report["arms"].items():
        mean = "-" if arm["mean"] is None else f"{arm['mean']:.4g}"
        note = "control" if name == report["control"] else arm.get("verdict", "")
        if arm.get("difference_interval"):
            low, high = arm["difference_interval"]
            note += f", {arm['difference']:+.4g} [{low:.4g}, {high:.4g}]"
        note += ", rolled back" if arm["rolled_back"] else ""
        counts = " ".join(f"{arm[key]:>9,}" for key in ("exposures", "in_window", "judged", "outcomes"))
        rows.append(f"  {name:<16} {arm['propensity']:>8.1%} {counts}  {mean:>9}  {note}")
    arms = report["arms"].values()
    if any(arm["in_window"] for arm in arms) and not any(arm["judged"] for arm in arms):
        window = report["config"]["outcome_window_s"]
        rows.append(
            f"  no unit is judged yet: each is judged when its window of {window:g} s is over (outcome_window_s)"
        )
    return rows + [f"  warning: {warning}" for warning in report.get("warnings", ())]


def watch(url: str, name: str) -> Iterator[JsonObject]:
    """Yield the experiment's report again and again, until it is over."""
    while True:
        report = request_json(url, experiment_path(name))
        yield report
        if report["status"] in FINAL_STATUSES:
            return
        time.sleep(WATCH_S)
