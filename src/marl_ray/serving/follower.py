"""Keeps a replica on the store's word: polls every experiment's state, and looks at the evidence."""

import logging
import math
import random
import secrets
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from marl_ray.errors import MarlRayError
from marl_ray.serving.administration import FROM_API
from marl_ray.serving.arms import load_bundles
from marl_ray.serving.decisions import config_of, decide
from marl_ray.serving.router import LoadedExperiment

if TYPE_CHECKING:
    from marl_ray.serving.gateway import Gateway

POLL_S = 0.25
"""A change of weights or state reaches every replica within this and one short query."""
DECIDE_S = 1.0
LOAD_AGAIN_S = 15.0
"""Pause before an experiment that could not be loaded is tried again."""
CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class Follower:
    """One thread per replica. While the database is away the last state stays in force."""

    def __init__(self, gateway: "Gateway"):
        self._gateway = gateway
        self._replica = secrets.token_hex(8)
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._loading: dict[str, float] = {}
        """Experiment -> when loading it was begun."""
        self._told: dict[str, Any] = {}
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
        gateway = self._gateway
        if decide_too:
            for router in gateway.endpoints.routers.values():
                decide(gateway.store, router.config)
                self._tell_shadows(router.config.name)
        # One at a time, so that no state is followed after a later one.
        with self._looking:
            for name, state in gateway.store.states().items():
                known = gateway.endpoints.routers.get(name)
                if known is None:
                    self._load(name)
                elif state != known.state:
                    known.follow(state)

    def _tell_shadows(self, name: str) -> None:
        totals = {arm: asdict(t) for arm, t in self._gateway.endpoints.routers[name].shadows.totals.items()}
        if totals and totals != self._told.get(name):
            self._gateway.store.record_shadows(name, self._replica, totals)
            self._told[name] = totals

    def _load(self, name: str) -> None:
        """Take up an experiment that was created over HTTP, in a thread of its own: bundles may be large."""
        began = self._loading.get(name)
        if began is None or time.monotonic() > began + LOAD_AGAIN_S:
            self._loading[name] = time.monotonic()
            threading.Thread(target=self._take_up, args=(name,), name=f"load-{name}", daemon=True).start()

    def _take_up(self, name: str) -> None:
        gateway = self._gateway
        try:
            record = gateway.store.experiment(name)
            if record is None or record.config.get("origin") != FROM_API["origin"]:
                self._loading[name] = math.inf  # another gateway's, by its config
                return
            config = config_of(record)
            bundles = load_bundles(config, gateway.config.tracking_uri, gateway.models)
            gateway.open(LoadedExperiment(config, bundles), **FROM_API)
        except MarlRayError as error:
            _log.error("experiment %s is not loaded here: %s", name, error)
        except Exception:
            _log.exception("experiment %s is not loaded here", name)
        else:
            self._loading.pop(name, None)

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
