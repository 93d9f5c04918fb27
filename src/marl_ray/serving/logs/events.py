"""The gateway's log of events: one line of JSON each."""

import logging
import time

import orjson

_events = logging.getLogger("marl_ray.access")


def log_line(event: str, **fields: object) -> None:
    """Write one event."""
    _events.warning("%s", orjson.dumps({"at": time.time(), "event": event, **fields}).decode())
