"""Keeps a replica on the store's word: polls every experiment's state, and looks at the evidence."""

import logging
import random
import threading
import time
from collections.abc import Mapping

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store import ExperimentStore
from marl_ray.serving.decisions import decide
from marl_ray.serving.router import Router

POLL_S = 0.25
"""A change of weights or state reaches every replica within this and one short query."""
DECIDE_S = 1.0
CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class Follower:
    """One thread per replica. While the database is away the last state stays in force."""

    def __init__(self, store: ExperimentStore, routers: Mapping[str, Router]):
        self._store, self._routers = store, routers
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; twice is once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            self._thread = None

    def look(self, decide_too: bool = True) -> None:
        """Follow every experiment once. Raises MarlRayError if the store cannot be read."""
        for name, router in self._routers.items():
            if decide_too:
                decide(self._store, router.config)
            state = self._store.table(name)
            if state != router.state:
                router.follow(state)

    def _run(self) -> None:
        failing = False
        # Replicas look at different moments, so that one change is rarely tried by two.
        next_decision = time.monotonic() + random.uniform(0, DECIDE_S)
        while not self._closing.wait(POLL_S):
            due = time.monotonic() >= next_decision
            if due:
                next_decision = time.monotonic() + DECIDE_S
            try:
                self.look(due)
                failing = False
            except MarlRayError as error:
                if not failing:  # one line per outage, not four per second
                    _log.error("the last known weights stay in force: %s", error)
                failing = True
            except Exception:  # a thread that ends would leave rolled-back arms exposed
                _log.exception("following the experiments failed")
