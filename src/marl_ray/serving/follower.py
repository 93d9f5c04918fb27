"""Keeps a replica on the store's word: polls every experiment's state, and looks at the evidence."""

import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store import StoreError
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
    """Two threads per replica, so that following never waits for statistics. While the database is away the last state
    stays in force."""

    def __init__(self, gateway: "Gateway"):
        self._gateway = gateway
        self._replica = secrets.token_hex(8)
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._loading: dict[str, float] = {}
        """Experiment -> when loading it was begun."""
        self._told: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; twice is once."""
        if not self._threads:
            # Replicas look at different moments, so that one change is rarely tried by two.
            loops = ((self.look, POLL_S, 0.0), (self.decide, DECIDE_S, random.uniform(0, DECIDE_S)))
            self._threads = [threading.Thread(target=self._run, args=a, name="follower", daemon=True) for a in loops]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._threads = []

    def decide(self) -> None:
        """Store which sessions failed here, and look at the evidence of every experiment once."""
        problem: StoreError | None = None
        try:
            self._gateway.failed_sessions.write()
        except StoreError as error:  # a full disk, say, which must not keep anything from being rolled back
            problem = error
        for name, router in self._gateway.endpoints.routers.items():
            try:
                decide(self._gateway.store, router.config)
                self._tell_shadows(name)
            except StoreError:
                raise  # the same for all of them
            except Exception:  # one experiment's numbers must not keep the others from being rolled back
                _log.exception("experiment %s: its evidence cannot be judged", name)
        if problem is not None:
            raise problem

    def look(self) -> None:
        """Follow every experiment once. Raises MarlRayError if the store cannot be read."""
        gateway = self._gateway
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

    def _run(self, step: Callable[[], None], every_s: float, pause: float) -> None:
        failing = False
        while not self._closing.wait(pause):
            pause = every_s
            try:
                step()
                failing = False
            except MarlRayError as error:
                if not failing:  # one line per outage, not four per second
                    _log.error("the last known weights stay in force: %s", error)
                failing = True
            except Exception:  # a thread that ends would leave rolled-back arms exposed
                _log.exception("following the experiments failed")
