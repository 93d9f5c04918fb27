"""Loads the arms that the experiments of a replica need, and drops all others."""

import logging
import threading
import time
from collections.abc import Collection, Mapping

from marl_ray.closing import close_all
from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.serving.arm_loading.live_experiments import LiveExperiments
from marl_ray.serving.arm_loading.loaded_bundles import check_arms, load_arms
from marl_ray.serving.arm_loading.needed_arms import needed_arms, served_here
from marl_ray.serving.arms.protocol import Arm, TextArm
from marl_ray.serving.routing.experiment.router import Router

ROUND_S = 15.0
"""Seconds between rounds that drop unneeded arms and retry missing ones when no state changes."""

_log = logging.getLogger(__name__)


class ArmLoader:
    """Loads and drops the arms of one replica.

    One thread at a time may call `load_and_drop`, which starts a thread for each experiment whose arms are to be loaded; all
    else is safe to read from any thread.
    """

    def __init__(self, live_experiments: LiveExperiments):
        """Load and drop the arms of these experiments."""
        self._live_experiments = live_experiments
        self.needed: Mapping[str, frozenset[str]] = {}
        """Experiment -> the arms that it needs to be loaded here. Replaced and never changed."""
        self.missing: dict[str, dict[str, str]] = {}
        """Experiment -> arm -> the reason why its bundle could not be loaded."""
        self._loading: set[str] = set()
        """Experiments whose arms a thread loads. `load_and_drop` adds, and the thread removes."""
        self._next_round_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return True if `load_and_drop` should be called although no state has changed.

        `now` is in monotonic seconds.
        """
        return now >= self._next_round_at

    def load_and_drop(self, states: Mapping[str, AssignmentState], ended: Mapping[str, float], waits: bool) -> None:
        """Load the arms that are needed in these states, in threads unless `waits`, and drop all others.

        `ended` is the end of experiments that this process has seen end, in seconds since 1970.
        """
        # Before the arms are looked through: a thread that ends meanwhile asks for another round, which must not be lost.
        self._next_round_at = time.monotonic() + ROUND_S
        routers = self._live_experiments.endpoints.routers
        followed = [state for state in served_here(states, routers) if state.experiment in routers]
        needed = needed_arms(followed, time.time(), ended)
        # Another gateway may have added arms that this one's config lacks.
        self.needed = {name: arms & routers[name].config.arms.keys() for name, arms in needed.items()}
        for name, arms in self.needed.items():
            router = routers[name]
            self._drop(router, router.arms.keys() - arms)
            if arms - router.arms.keys() and name not in self._loading:
                self._loading.add(name)
                if waits:
                    self._load(router, arms)
                else:  # in a thread, because bundles may be large
                    threading.Thread(target=self._load, args=(router, arms), name=f"load-{name}", daemon=True).start()

    def _drop(self, router: Router, arms: Collection[str]) -> None:
        if arms:
            close_all(arm.close for arm in self._live_experiments.endpoints.drop_arms(router, arms))

    def _load(self, router: Router, arms: Collection[str]) -> None:
        """Load those arms of an experiment that are not loaded yet.

        A failure is logged once and tried again later; until then other arms answer.
        """
        name = router.config.name
        arms_to_load = [arm for arm in router.config.arms if arm in arms and arm not in router.arms]
        try:
            missing = self._load_arms(router, arms_to_load)
        except MarlRayError as error:
            missing = dict.fromkeys(arms_to_load, str(error))
        except Exception as error:
            _log.exception("experiment %s: arms %s are not loaded", name, ", ".join(arms_to_load))
            missing = dict.fromkeys(arms_to_load, repr(error))
        known_errors = self.missing.get(name, {})
        for arm, reason in missing.items():
            if known_errors.get(arm) != reason:
                _log.error("arm %s is not loaded, another one answers for it: %s", arm, reason)
        self.missing[name] = missing
        self._loading.discard(name)
        if not missing:
            self._next_round_at = 0.0  # a round follows at once, because other arms may be needed by now

    def _load_arms(self, router: Router, arms_to_load: Collection[str]) -> dict[str, str]:
        """Load these arms and answer with them. Returns the reason for each arm that could not be loaded."""
        live_experiments = self._live_experiments
        config = router.config
        record = live_experiments.store.read(config.name)
        stored = record.config["arms"] if record is not None else {}
        loaded, errors = load_arms(config, arms_to_load, live_experiments.bundles, stored)
        check_arms(config, {name: arm.bundle for name, arm in router.arms.items()} | loaded)
        missing = {arm: str(error) for arm, error in errors.items()}
        new_arms: dict[str, Arm | TextArm] = {}
        try:
            for arm, bundle in loaded.items():
                try:
                    new_arms[arm] = live_experiments.start_arm(config, arm, bundle)
                except MarlRayError as error:
                    missing[arm] = str(error)
        except BaseException:  # no arm answers yet, and the next round makes them all again
            close_all(new_arm.close for new_arm in new_arms.values())
            raise
        if new_arms:
            live_experiments.endpoints.add_arms(router, new_arms)
        return missing

    def arm_states(self) -> dict[str, dict[str, str]]:
        """Return the experiment that serves -> arm -> `loaded`, `loading` or `missing`."""
        states_by_experiment = {}
        for name, arms in self.needed.items():
            router = self._live_experiments.endpoints.routers[name]
            missing = self.missing.get(name, {})
            states = {arm: "missing" if arm in missing else "loading" for arm in router.config.arms if arm in arms}
            if states:
                states_by_experiment[name] = states | {arm: "loaded" for arm in states if arm in router.arms}
        return states_by_experiment
