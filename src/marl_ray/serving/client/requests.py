"""Requests to a gateway over HTTP, whose answers are checked and whose refusals are errors."""

import os
import re

import httpx

from marl_ray.config.base import NAME_PATTERN, PATTERNS
from marl_ray.deadlines.http_client import DeadlineClient, check_header_secret
from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.serving.client.answers import check_answer

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
