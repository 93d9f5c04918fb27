"""`marl_ray.Client`: a gateway over HTTP."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any, Self

import numpy as np

from marl_ray.api.calls import named_arguments, short_repr
from marl_ray.deadlines.http_client import DeadlineClient
from marl_ray.deadlines.seconds import EXPECTED_SECONDS, are_seconds
from marl_ray.errors import FieldError, one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.serving.client.requests import experiment_path, gateway_url, key_headers, request_json_with


@dataclass(frozen=True)
class ActResult:
    """The actions that a gateway returns, and the arm that chose them."""

    actions: dict[str, Any]
    """Agent -> action as the environment takes it; for language models the response."""
    session: str
    """The session's id, for `Client.record_outcome`."""
    experiment: str
    """The experiment that assigned the session."""
    arm: str
    log_probs: dict[str, float]
    """Agent -> log-probability of its action."""


class Client:
    """An HTTP client of a gateway. Without a `key` it sends the one in MARL_RAY_API_KEY."""

    @named_arguments
    def __init__(self, url: str = "http://127.0.0.1:8000", key: str | None = None, timeout_s: float = 30.0):
        """Prepare requests to the gateway at `url`, each with a deadline of `timeout_s` seconds.

        Raises MarlRayError for a `url` that is none and for a key that no header can hold, and a FieldError that names
        another argument that no request can be made with.
        """
        if not isinstance(key, str | None):
            raise FieldError("key", f"expected a text, got {type(key).__name__}")
        if not are_seconds(timeout_s):
            raise FieldError("timeout_s", f"expected {EXPECTED_SECONDS}, got {short_repr(timeout_s)}")
        self._client = DeadlineClient(base_url=gateway_url(url), timeout=timeout_s, headers=key_headers(key))

    @named_arguments
    def act(
        self,
        observations: Mapping[str, Any],
        session: str | None = None,
        *,
        experiment: str | None = None,
        greedy: bool = False,
        action_masks: Mapping[str, Any] | None = None,
        attributes: JsonMapping | None = None,
    ) -> ActResult:
        """Return the actions for the agents whose observations are given.

        An observation is an array or a list, or a text for a language model. A session gets the same arm each time.
        Without one the call starts a new session, whose id is in the result. `experiment` is an endpoint or an
        experiment, needed if the gateway has several. Raises MarlRayError with the gateway's message if it refuses the
        request, or if it does not answer in time, and a FieldError that names an argument that JSON cannot hold, such as
        an observation that is not finite.
        """
        if not isinstance(attributes, Mapping | None):
            raise FieldError("attributes", f"expected a mapping of names to values, got {type(attributes).__name__}")
        session = session or f"session-{secrets.token_hex(8)}"
        body = {
            "session_id": session,
            "observations": _to_lists("observations", observations),
            "mode": "greedy" if greedy else "sample",
            "experiment": experiment,
            "action_masks": None if action_masks is None else _to_lists("action_masks", action_masks),
            "attributes": None if attributes is None else dict(attributes),
        }
        answer = self.request("/v1/act", body)
        return ActResult(answer["actions"], session, answer["experiment"], answer["arm"], answer["log_probs"])

    @named_arguments
    def generate(
        self, prompt: str, session: str | None = None, *, experiment: str | None = None, **settings: Any
    ) -> dict[str, object]:
        """Return the response of `/generate`.

        The response has `text`, `tokens`, `log_probs`, `finish_reason`, `arm` and more. `settings` are fields such as
        `agent`, `max_tokens`, `temperature` or `seed`. Raises MarlRayError as `act` does.
        """
        session = session or f"session-{secrets.token_hex(8)}"
        return self.request("/generate", {"session_id": session, "prompt": prompt, "experiment": experiment} | settings)

    @named_arguments
    def record_outcome(
        self,
        session: str,
        value: float,
        metrics: Mapping[str, float] | None = None,
        *,
        experiment: str | None = None,
    ) -> dict[str, object]:
        """Record the outcome of a session; larger is better.

        `metrics` are further numbers by name, for guardrails. Numbers may be of NumPy. Raises MarlRayError as `act` does,
        and a FieldError that names what is no number or not finite.
        """
        if metrics is not None and not isinstance(metrics, Mapping):
            raise FieldError("metrics", f"expected a mapping of names to numbers, got {type(metrics).__name__}")
        body = {
            "session_id": session,
            "value": _finite_number("value", value),
            "metrics": None
            if metrics is None
            else {name: _finite_number(f"metrics.{name}", number) for name, number in metrics.items()},
            "experiment": experiment,
        }
        return self.request("/v1/outcomes", body)

    def experiments(self) -> list[dict[str, object]]:
        """Return all experiments with their status and shares. Raises MarlRayError as `act` does."""
        experiments: list[dict[str, object]] = self.request("/v1/experiments")["experiments"]
        return experiments

    @named_arguments
    def experiment(self, name: str) -> dict[str, object]:
        """Return the report of one experiment: arms, outcomes, intervals and verdicts.

        Raises MarlRayError as `act` does.
        """
        return self.request(experiment_path(name))

    @named_arguments
    def request(self, path: str, body: JsonMapping | None = None) -> JsonObject:
        """Return the JSON answer to a GET, or to a POST of the body's fields that are not None.

        Raises MarlRayError as `act` does, and a FieldError that names a field that JSON cannot hold.
        """
        if body is None:
            return request_json_with(self._client, path)
        if not isinstance(body, Mapping):
            raise FieldError("body", f"expected a mapping of fields to values, got {type(body).__name__}")
        fields = _plain_numbers({name: value for name, value in body.items() if value is not None})
        try:
            return request_json_with(self._client, path, fields)
        except (TypeError, ValueError, RecursionError):
            _check_json("", fields)  # only now: it encodes the body once more, to name the field
            raise

    def close(self) -> None:
        """Close the connections, as the end of `with Client(...) as client` does."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _to_lists(argument: str, by_agent: Mapping[str, object]) -> dict[str, object]:
    """Return the arrays by agent as JSON has them; texts stay as they are.

    Raises FieldError that names the argument, and the agent whose array is ragged.
    """
    if not isinstance(by_agent, Mapping):
        raise FieldError(argument, f"expected a mapping of agents, got {type(by_agent).__name__}")
    lists: dict[str, object] = {}
    for agent, value in by_agent.items():
        try:
            lists[agent] = value if isinstance(value, str) else np.asarray(value).tolist()
        except ValueError as error:
            raise FieldError(f"{argument}.{agent}", f"expected an array: {one_line(error)}") from error
    return lists


def _finite_number(argument: str, value: object) -> float:
    """Return a number of Python or NumPy as a float.

    Raises FieldError that names the argument for anything else, also for a text of digits and for a true or false.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise FieldError(argument, f"expected a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError as error:
        raise FieldError(argument, f"expected a number, got {value!r}") from error
    if not math.isfinite(number):
        raise FieldError(argument, f"expected a finite number, got {number}")
    return number


def _plain_numbers(fields: JsonMapping) -> JsonObject:
    """Return the fields, and those of mappings in them, with Python's numbers in place of NumPy's."""
    return {
        name: _plain_numbers(value)
        if isinstance(value, Mapping)
        else value.item()
        if isinstance(value, np.generic)
        else value
        for name, value in fields.items()
    }


def _check_json(path: str, value: object) -> None:
    """Raise FieldError if JSON cannot hold a value; it names the innermost key by its path with dots."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(value, Mapping):
            for key, field in value.items():
                _check_json(f"{path}.{key}".lstrip("."), field)
        raise FieldError(path or "body", f"expected what JSON can hold: {one_line(error)}") from error
