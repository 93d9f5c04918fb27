"""Fields that control how a text is written, of `/generate` and of OpenAI's paths."""

from typing import Any, NamedTuple

from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.serving.http.messages import RequestError

SETTINGS = frozenset({"max_tokens", "temperature", "top_p", "stop", "seed"})
GREEDY_BELOW = 0.01
"""Lower temperatures count as 0, because dividing logits by them would overflow."""
MAX_TEMPERATURE = 2.0
"""The limit of OpenAI's API."""
MIN_TOP_P = 1e-6
"""A smaller `top_p` counts as this one, which keeps the most likely token alone."""
MAX_STOPS, MAX_STOP_LENGTH = 4, 200
"""Maximum number of stop strings of a request, and maximum number of characters of one."""
MAX_TOKENS = 1_000_000
"""Maximum of `max_tokens` and of `top_k`."""
SEEDS = 1 << 63
"""Seeds are integers from -SEEDS to SEEDS - 1."""


class Settings(NamedTuple):
    """A request's settings for its text; see `TextRequest`."""

    seed: int | None
    """None if the request names none."""
    greedy: bool
    """True if the request's temperature is below GREEDY_BELOW."""
    changes: JsonObject
    """Fields of the bundle's GenerationConfig that the request overrides."""


def settings_of(data: JsonMapping) -> Settings:
    """Read the settings; a missing or null one is as in training. Raises RequestError 400 naming the field."""
    changes: JsonObject = {}
    tokens, top_k, seed = (data.get(name) for name in ("max_tokens", "top_k", "seed"))
    if tokens is not None:
        changes["max_tokens"] = _check_integer("max_tokens", tokens, 1, MAX_TOKENS)
    if top_k is not None:
        changes["top_k"] = _check_integer("top_k", top_k, 0, MAX_TOKENS)
    if seed is not None:
        _check_integer("seed", seed, -SEEDS, SEEDS - 1)
    temperature = data.get("temperature")
    top_p = data.get("top_p")
    if temperature is not None and not (_is_number(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise RequestError(400, "temperature", f"expected a number from 0 (greedy) to {MAX_TEMPERATURE:g}")
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        raise RequestError(400, "top_p", "expected a number above 0, 1 at most")
    greedy = temperature is not None and temperature < GREEDY_BELOW
    if temperature is not None and not greedy:
        changes["temperature"] = float(temperature)
    if top_p is not None:
        changes["top_p"] = max(float(top_p), MIN_TOP_P)
    stop = data.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(_is_stop(text) for text in stops):
            raise RequestError(400, "stop", f"expected {MAX_STOPS} texts at most, of 1 to {MAX_STOP_LENGTH} characters")
        changes["stop"] = tuple(stops)
    return Settings(seed, greedy, changes)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_LENGTH


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(400, name, f"expected an integer from {low} to {high}")
    return value
