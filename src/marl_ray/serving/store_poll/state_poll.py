"""The poll of the store, by which a replica's experiments take over the states that the store has."""

import logging
import math
import threading
import time
from collections.abc import Mapping

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.serving.arm_loading.arm_loader import ArmLoader
from marl_ray.serving.arm_loading.live_experiments import LiveExperiments
from marl_ray.serving.arm_loading.needed_arms import API_ORIGIN
from marl_ray.serving.ramp_decisions.ramp_control import config_of
from marl_ray.serving.ramp_decisions.webhook import Webhook
from marl_ray.serving.routing.experiment.followable_states import followable_state, unknown_arms
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.store_poll.ended_experiments import EndedExperiments

_log = logging.getLogger(__name__)


class StatePoll:
    """Follows the states of all experiments.

    It is safe to use from several threads: a request that has changed an experiment polls too.
    """

    def __init__(
        self,
        live_experiments: LiveExperiments,
        arm_loader: ArmLoader,
        ended: EndedExperiments,
        webhook: Webhook | None,
    ):
        """Change `live_experiments`, and let `arm_loader` load what the states need.

        `ended` is told which experiments end, and `webhook` is woken when there is news.
        """
        self._live_experiments = live_experiments
        self._arm_loader = arm_loader
        self._ended = ended
        self._webhook = webhook
        self._polling = threading.Lock()
        """All below is read and written with it held."""
        self._states: Mapping[str, AssignmentState] = {}
        self._reported_at = -math.inf
        """Moment at which the store last reported its state, in monotonic seconds."""
        self._refused: set[str] = set()
        """Experiments that this version cannot serve."""
        self._logged_arms: dict[str, frozenset[str]] = {}
        """Experiment -> the arms of which the log says that this gateway's config lacks them."""

    def poll(self, waits: bool = False) -> None:
        """Follow every experiment once and load the arms that it needs, in threads unless `waits`.

        Raises MarlRayError if the store cannot be read.
        """
        # One thread at a time, so that no older state replaces a newer one.
        with self._polling:
            requested_at = time.monotonic()
            reported_at = self._reported_at
            states = self._live_experiments.store.states()
            has_news = states is not self._states
            if has_news or self._arm_loader.is_due(requested_at):
                self._apply_states(states, reported_at)
                self._arm_loader.load_and_drop(states, self._ended.draining_experiments(time.time()), waits)
            if has_news and self._webhook is not None:
                self._webhook.wake()
            self._states = states
            self._reported_at = requested_at

    def _apply_states(self, states: Mapping[str, AssignmentState], reported_at: float) -> None:
        routers = self._live_experiments.endpoints.routers
        for name, state in states.items():
            router = routers.get(name)
            if router is None:
                self._route_new(name, state)
            elif (state := self._followable(router, state)) != router.rules.state:
                self._follow(router, state, reported_at)

    def _route_new(self, name: str, state: AssignmentState) -> None:
        """Route to an experiment that was created over HTTP; its arms are loaded later."""
        if state.origin != API_ORIGIN or name in self._refused:
            return  # it belongs to another gateway's config, or this version cannot read its config
        record = self._live_experiments.store.read(name)
        if record is None:
            return
        try:
            self._live_experiments.take_in(config_of(record), state)
        except MarlRayError as error:
            self._refused.add(name)
            _log.error("experiment %s is not served here: %s", name, error)

    def _followable(self, router: Router, state: AssignmentState) -> AssignmentState:
        """Return what a router can follow of a state, and log once that another gateway's config has added arms."""
        name = router.config.name
        arms = router.config.arms.keys()
        unknown = unknown_arms(arms, state)
        if unknown and self._logged_arms.get(name) != unknown:
            self._logged_arms[name] = unknown
            _log.error(
                "experiment %s: its last known weights stay in force here but for rollbacks: this gateway's config has no "
                "arm %s, which another one's has",
                name,
                ", ".join(sorted(unknown)),
            )
        return followable_state(arms, router.rules.state, state)

    def _follow(self, router: Router, state: AssignmentState, reported_at: float) -> None:
        was_over = router.rules.state.is_over
        router.follow(state, reported_at)
        if router.rules.state.is_over and not was_over:
            self._ended.add(router.config.name, time.time())
