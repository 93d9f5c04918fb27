"""One POST of JSON to a service that nobody here controls: its answer is whole, and of a limited size, by a deadline."""

import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from marl_ray.deadlines.http_client import DeadlineClient


class ServiceAnswer(NamedTuple):
    """The answer of a service, whatever its status."""

    status: int
    body: bytes
    retry_after_s: float
    """Seconds after which the service wants to be asked again (RFC 9110, section 10.2.3); 0 if it does not say."""


def post_json(
    client: DeadlineClient, url: str, content: Mapping[str, object], deadline: float, max_bytes: int
) -> ServiceAnswer:
    """Return the answer to one POST, which is whole by `deadline`, a time of `time.monotonic`.

    Of a body of more than `max_bytes` the beginning is returned, which is longer than `max_bytes`. Raises
    httpx.RequestError if there is no answer, and httpx.ReadTimeout if the answer is late.
    """
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise httpx.ReadTimeout("no time is left for a request")
    body = bytearray()
    with client.stream("POST", url, json=content, timeout=remaining_s) as response:
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > max_bytes:
                break
        wait = response.headers.get("retry-after", "")
        return ServiceAnswer(response.status_code, bytes(body), float(wait) if re.fullmatch(r"\d{1,4}", wait) else 0.0)
