"""The two threads of a replica that follow the store.

One polls states, the other one decides on the evidence.
"""

import logging
import random
import threading
from collections.abc import Callable

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.facade import Stores
from marl_ray.experiments.store.notices import Notices
from marl_ray.serving.arm_loading.arm_loader import ArmLoader
from marl_ray.serving.arm_loading.live_experiments import LiveExperiments
from marl_ray.serving.arm_loading.preloader import Preloader
from marl_ray.serving.ramp_decisions.webhook import Webhook
from marl_ray.serving.routing.unit_reports import UnitReports
from marl_ray.serving.store_poll.ended_experiments import EndedExperiments
from marl_ray.serving.store_poll.evidence_round import EvidenceRound
from marl_ray.serving.store_poll.state_poll import StatePoll

POLL_S = 0.25
"""Seconds between polls; every replica sees a change of weights or state within this time and one short query."""
DECIDE_S = 1.0
"""Seconds between decisions on ramps; each replica begins at a random part of it, so that they differ."""
CLOSE_S = 5.0
"""Seconds that closing waits for each thread."""

_log = logging.getLogger(__name__)


class StoreFollower:
    """Two threads per replica, so that following the store never waits for statistics.

    While the database does not answer, the last state stays in force. Ended experiments are neither polled nor judged
    one by one.
    """

    def __init__(
        self,
        stores: Stores,
        live_experiments: LiveExperiments,
        notices: Notices,
        unit_reports: UnitReports,
        webhook: Webhook | None,
    ):
        """Follow the store: change `live_experiments`, and wake `webhook` when there is news."""
        self.ended = EndedExperiments()
        self.arm_loader = ArmLoader(live_experiments)
        self.evidence = EvidenceRound(stores, live_experiments, unit_reports, self.arm_loader, self.ended)
        self._states = StatePoll(live_experiments, self.arm_loader, self.ended, webhook)
        self._preloader = Preloader(live_experiments, notices)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; a second call does nothing."""
        if not self._threads:
            # Replicas start at different moments, so that two rarely try the same change.
            loops = ((self.poll, POLL_S, 0.0), (self.decide, DECIDE_S, random.uniform(0, DECIDE_S)))
            self._threads = [threading.Thread(target=self._run, args=a, name="follower", daemon=True) for a in loops]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """End the threads.

        One that waits for the database is left after CLOSE_S seconds, and ends with the process.
        """
        self._closing.set()
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._threads = []

    def poll(self, waits: bool = False) -> None:
        """Take over the states of the store, as `StatePoll.poll` does. From any thread."""
        self._states.poll(waits)

    def decide(self) -> None:
        """Decide on the evidence once, and begin to load the bundles that clients asked for ahead.

        One thread at a time may call it.
        """
        self.evidence.decide()
        self._preloader.preload()

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
