"""The threads that follow the store: they poll states, hold the arms that serve, and decide on the evidence."""

import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.experiments.store.experiment_store import AssignmentState, StoreError
from marl_ray.experiments.store.notices import Notices
from marl_ray.serving.arms.protocol import Arm, TextArm
from marl_ray.serving.held_arms import API, needed, served_here
from marl_ray.serving.live_experiments import LiveExperiments
from marl_ray.serving.loaded_bundles import check_arms, load_arms
from marl_ray.serving.rollouts.rollout_control import config_of, decide
from marl_ray.serving.rollouts.webhook import Webhook
from marl_ray.serving.routing.endpoints import DRAIN_S
from marl_ray.serving.routing.router import Router
from marl_ray.serving.routing.unit_reports import UnitReports

POLL_S = 0.25
"""Seconds between polls; every replica sees a change of weights or state within this time and one short query."""
DECIDE_S = 1.0
TEND_S = 15.0
"""Seconds between rounds that drop unneeded arms and retry missing ones when no state changes."""
WINNER_S = 30.0
"""Seconds between looks at the evidence of a promoted experiment that serves its endpoint and still gets units. Any
other ended experiment is looked at when the outcome window of a unit ends."""
PRELOADED_S = 86_400.0
"""Seconds that a preloaded bundle is held while no experiment uses it."""
CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class StoreFollower:
    """Two threads per replica, so that following the store never waits for statistics. While the database does not
    answer, the last state stays in force. Ended experiments are neither polled nor judged one by one."""

    def __init__(
        self,
        live_experiments: LiveExperiments,
        notices: Notices,
        unit_reports: UnitReports,
        webhook: Webhook | None,
    ):
        """Follow the store: change `live_experiments`, and poke `webhook` when there is news."""
        self._live_experiments, self._notices, self._webhook = live_experiments, notices, webhook
        self._unit_reports = unit_reports
        self._replica = secrets.token_hex(8)
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._states: dict[str, AssignmentState] = {}
        self._reported_at = -math.inf
        """Moment at which the store last told its state, in monotonic seconds."""
        self._tend_at = 0.0
        self._ended: dict[str, float] = {}
        """Experiment -> moment at which it ended, for experiments that this process has seen running."""
        self._needed_arms: dict[str, frozenset[str]] = {}
        """Experiment -> the arms that this replica shall hold."""
        self.missing: dict[str, dict[str, str]] = {}
        """Experiment -> arm -> the reason why its bundle could not be loaded."""
        self._loading: set[str] = set()
        self._due: dict[str, float] = {}
        """Ended experiment -> moment of its next look, by the database's clock; absent while no unit is in its outcome
        window."""
        self.winners_at = 0.0
        """Moment of the next look at promoted experiments, in monotonic seconds."""
        self._preload_at: dict[str, float] = {}
        """Reference of a bundle to preload -> moment of the next attempt, in monotonic seconds."""
        self._recorded_shadows: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; a second call does nothing."""
        if not self._threads:
            # Replicas start at different moments, so that two rarely try the same change.
            loops = ((self.look, POLL_S, 0.0), (self.decide, DECIDE_S, random.uniform(0, DECIDE_S)))
            self._threads = [threading.Thread(target=self._run, args=a, name="follower", daemon=True) for a in loops]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._threads = []

    def note_late(self, name: str) -> None:
        """Note that an outcome came for an ended experiment, perhaps of a unit whose exposure was stored only now. It
        may still prove harm once its window is over."""
        self._due[name] = -math.inf

    def decide(self) -> None:
        """Store which sessions failed here and what they cost, then look once at the evidence of open experiments, and
        of ended ones that may have new outcomes."""
        problem: StoreError | None = None
        try:
            self._unit_reports.write()
        except StoreError as error:  # such as a full disk, which must not prevent rollbacks
            problem = error
        for router in self._to_judge(time.monotonic()):
            name = router.config.name
            try:
                self._due.pop(name, None)
                if decide(self._live_experiments.store, router.config) is not None and router.is_over:
                    self._note_due(name)
                self._record_shadows(name)
            except StoreError:
                self._due[name] = -math.inf
                raise  # the database failed, so all other experiments would fail too
            except Exception:  # a defect in one experiment's numbers must not prevent rollbacks in the others
                _log.exception("experiment %s: its evidence cannot be judged", name)
        for name in list(self._ended):  # `look` adds to it in another thread
            self._record_shadows(name)
        self._preload()
        if problem is not None:
            raise problem

    def _note_due(self, name: str) -> None:
        """Note when the next outcome window of this ended experiment ends, which is the moment of its next look."""
        record = self._live_experiments.store.experiment(name)
        at = None if record is None else self._live_experiments.store.next_judged(record)
        if at is not None:
            self._due[name] = min(at, self._due.get(name, math.inf))

    def _preload(self) -> None:
        """Load the bundles that a client asked this or another replica to load ahead of their experiments."""
        live_experiments = self._live_experiments
        held = list(live_experiments.models)  # before the notices are read: others load what a notice names already
        wanted_ahead = self._notices.preloads(time.time() - PRELOADED_S)
        live_experiments.drop_models(reference for reference in held if reference not in wanted_ahead)
        now = time.monotonic()
        for reference in wanted_ahead:
            if reference not in live_experiments.models and self._preload_at.get(reference, 0.0) <= now:
                self._preload_at[reference] = now + TEND_S
                threading.Thread(target=self._load_model, args=(reference,), name="load-model", daemon=True).start()

    def _load_model(self, reference: str) -> None:
        try:
            self._live_experiments.hold_model(reference, self._live_experiments.bundles.load(reference))
        except MarlRayError as error:
            _log.error("a bundle is not loaded ahead: %s", error)
        except Exception:
            _log.exception("bundle %s is not loaded ahead", reference)

    def _to_judge(self, now: float) -> list[Router]:
        routers = self._live_experiments.endpoints.routers
        names = {name for name, router in routers.items() if not router.is_over}
        if pending := list(self._due.items()):
            moment = self._live_experiments.store.settled_at()
            names |= {name for name, due in pending if due <= moment}
        if now >= self.winners_at:
            self.winners_at = now + WINNER_S
            serving = (routers[name] for name, arms in self._needed_arms.items() if arms)
            names |= {router.config.name for router in serving if router.state.status is ExperimentStatus.PROMOTED}
        return [routers[name] for name in routers if name in names]

    def look(self, waits: bool = False) -> None:
        """Follow every experiment once and load the arms that it needs, in threads unless `waits`. Raises MarlRayError
        if the store cannot be read."""
        # One thread at a time, so that no older state replaces a newer one.
        with self._looking:
            requested_at, reported_at = time.monotonic(), self._reported_at
            states = self._live_experiments.store.states()
            if states is self._states and requested_at < self._tend_at:
                self._reported_at = requested_at
                return
            routers = self._live_experiments.endpoints.routers
            for name, state in states.items():
                router = routers.get(name)
                if router is None:
                    self._take_in(name, state)
                elif state != router.state:
                    self._follow(router, state, reported_at)
            self._reported_at = requested_at
            self._tend(states, waits)
            if states is not self._states and self._webhook is not None:
                self._webhook.poke()
            self._states, self._tend_at = states, time.monotonic() + TEND_S

    def _take_in(self, name: str, state: AssignmentState) -> None:
        """Route to an experiment that was created over HTTP; its arms are loaded later."""
        record = self._live_experiments.store.experiment(name) if state.origin == API else None
        if record is None or name in self.missing:
            return  # it belongs to another gateway's config, or this version cannot read its config
        try:
            self._live_experiments.take_in(config_of(record), state)
        except MarlRayError as error:
            self.missing[name] = {}
            _log.error("experiment %s is not served here: %s", name, error)

    def _follow(self, router: Router, state: AssignmentState, reported_at: float) -> None:
        was_over = router.is_over
        router.follow(state, reported_at)
        if router.is_over and not was_over:
            self._ended[router.config.name] = time.time()
            self._due[router.config.name] = -math.inf

    def _tend(self, states: dict[str, AssignmentState], waits: bool) -> None:
        """Load the arms that are needed, and drop all others."""
        routers, now = self._live_experiments.endpoints.routers, time.time()
        self._ended = {name: at for name, at in self._ended.items() if now - at < DRAIN_S}
        self._needed_arms = needed(
            [s for s in served_here(states, routers) if s.experiment in routers], now, self._ended
        )
        for name, arms in self._needed_arms.items():
            router = routers[name]
            unneeded = {arm: part for arm, part in router.arms.items() if arm not in arms}
            if unneeded:
                self._let_go(router, unneeded)
            if arms - router.arms.keys() and name not in self._loading:
                self._loading.add(name)
                if waits:
                    self._load(router, arms)
                else:  # in a thread, because bundles may be large
                    threading.Thread(target=self._load, args=(router, arms), name=f"load-{name}", daemon=True).start()

    def _let_go(self, router: Router, unneeded: dict[str, Arm | TextArm]) -> None:
        self._live_experiments.endpoints.hold(
            router, {arm: part for arm, part in router.arms.items() if arm not in unneeded}
        )
        for part in unneeded.values():
            close = getattr(part, "close", None)
            if close is not None:
                close()

    def _load(self, router: Router, arms: Collection[str]) -> None:
        """Load those arms of an experiment that are not loaded yet. A failure is logged once and tried again later;
        until then other arms answer."""
        live_experiments, config = self._live_experiments, router.config
        lacking = [arm for arm in config.arms if arm in arms and arm not in router.arms]
        missing: dict[str, str] = {}
        try:
            record = live_experiments.store.experiment(config.name)
            stored = record.config["arms"] if record is not None else {}
            loaded, errors = load_arms(config, lacking, live_experiments.bundles, stored)
            check_arms(config, {arm: part.bundle for arm, part in router.arms.items()} | loaded)
            missing = {arm: str(error) for arm, error in errors.items()}
            made = {}
            for arm, bundle in loaded.items():
                try:
                    made[arm] = live_experiments.arm(config, arm, bundle)
                except MarlRayError as error:
                    missing[arm] = str(error)
            if made:
                live_experiments.endpoints.hold(router, {**router.arms, **made})
        except MarlRayError as error:
            missing = dict.fromkeys(lacking, str(error))
        except Exception as error:
            _log.exception("experiment %s: arms %s are not loaded", config.name, ", ".join(lacking))
            missing = dict.fromkeys(lacking, repr(error))
        finally:
            known_errors = self.missing.get(config.name, {})
            for arm, why in missing.items():
                if known_errors.get(arm) != why:
                    _log.error("arm %s is not loaded, another one answers for it: %s", arm, why)
            self.missing[config.name] = missing
            self._loading.discard(config.name)
            if not missing:
                self._tend_at = 0.0  # look again at once, because other arms may be needed by now

    def arms(self) -> dict[str, dict[str, str]]:
        """Return the experiment that serves -> arm -> `loaded`, `loading` or `missing`."""
        state_by_arm = {}
        for name, arms in self._needed_arms.items():
            router, missing = self._live_experiments.endpoints.routers[name], self.missing.get(name, {})
            states = {arm: "missing" if arm in missing else "loading" for arm in router.config.arms if arm in arms}
            if states:
                state_by_arm[name] = states | {arm: "loaded" for arm in states if arm in router.arms}
        return state_by_arm

    def _record_shadows(self, name: str) -> None:
        totals = {arm: asdict(t) for arm, t in self._live_experiments.endpoints.routers[name].shadows.totals.items()}
        if totals and totals != self._recorded_shadows.get(name):
            self._live_experiments.store.record_shadows(name, self._replica, totals)
            self._recorded_shadows[name] = totals

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
