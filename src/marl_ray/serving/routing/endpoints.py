"""Endpoints, the names that clients act on.

An endpoint outlives its experiments: the newest one takes new sessions, and older ones keep theirs.
"""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from marl_ray.closing import close_all
from marl_ray.errors import MAX_COMPARED, did_you_mean
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.serving.arms.protocol import Arm, TextArm
from marl_ray.serving.errors import InvalidRequestError, UnknownExperimentError
from marl_ray.serving.routing.experiment.router import Router

DRAIN_S = 3600.0
"""Seconds in which sessions may finish with their arms after their experiment has ended or got a successor."""


class Endpoints:
    """All experiments of a replica, by their own names and by their endpoints."""

    def __init__(self) -> None:
        self.routers: dict[str, Router] = {}
        self._served: dict[str, tuple[Router, ...]] = {}
        self._acting: dict[str, tuple[Router, ...]] = {}
        """Endpoint -> its experiments that have loaded arms."""
        self._changing = threading.Lock()

    def add(self, router: Router) -> Router:
        """Add an experiment and return its router.

        If the experiment is known, its present router takes the arms that it lacks of the new one, and is returned.
        Tables are replaced and never changed, so that concurrent requests see complete ones.
        """
        with self._changing:
            present = self.routers.get(router.config.name)
            if present is None:
                name = router.config.served_as
                newest_first = sorted([router, *self._served.get(name, ())], key=lambda r: r.created, reverse=True)
                self._served = self._served | {name: tuple(newest_first)}
                self.routers = self.routers | {router.config.name: router}
                self._note_acting()
                return router
        self.add_arms(present, router.arms)
        return present

    def add_arms(self, router: Router, arms: Mapping[str, Arm | TextArm]) -> None:
        """Let an experiment answer with these arms too. Those that it has already, by another thread, are closed."""
        with self._changing:
            loaded_arms = router.arms
            router.replace_arms({**arms, **loaded_arms})
            self._note_acting()
        close_all(arm.close for name, arm in arms.items() if name in loaded_arms)

    def drop_arms(self, router: Router, arms: Collection[str]) -> list[Arm | TextArm]:
        """Let an experiment answer with these arms no longer, and return those that it had, for the caller to close."""
        with self._changing:
            loaded_arms = router.arms
            dropped = [arm for name, arm in loaded_arms.items() if name in arms]
            router.replace_arms({name: arm for name, arm in loaded_arms.items() if name not in arms})
            self._note_acting()
        return dropped

    def by_experiment(self) -> dict[str, str]:
        """Return experiment -> its endpoint."""
        return {name: router.config.served_as for name, router in self.routers.items()}

    def _note_acting(self) -> None:
        self._acting = {
            name: tuple(router for router in routers if router.arms) or routers
            for name, routers in self._served.items()
        }

    def routers_of(self, name: object) -> Sequence[Router]:
        """Return the experiments behind a name, newest first.

        The name may be omitted if there is only one endpoint. Raises UnknownExperimentError
        for a name that is unknown, and InvalidRequestError for one that is missing.
        """
        if name is None and len(self._served) == 1:
            return next(iter(self._served.values()))
        if not isinstance(name, str):
            raise InvalidRequestError(f"expected one of {self._served_names()}", "experiment")
        if name in self._served:
            return self._served[name]
        if name in self.routers:
            return (self.routers[name],)
        raise _unknown(name, {**self._served, **self.routers})

    def acting_routers(self, name: object) -> Sequence[Router]:
        """Return the experiments behind a name that have loaded arms, newest first, so that acts skip ended ones.

        All experiments behind the name if none has any. Raises as `routers_of` does.
        """
        routers = self.routers_of(name)
        return routers if len(routers) == 1 else self._acting[routers[0].config.served_as]

    def experiment(self, name: str) -> Router:
        """Return the experiment with exactly this name. Raises UnknownExperimentError without one."""
        if name not in self.routers:
            raise _unknown(name, self.routers)
        return self.routers[name]

    def _served_names(self) -> str:
        return ", ".join(self._served) or "none yet"


def current_experiment(routers: Sequence[Router], unit: str, cluster_id: str | None) -> Router:
    """Return the endpoint's experiment that a new unit enters.

    The experiment is the newest running one whose share of its layer contains the unit, else the newest that has begun.
    """
    for router in routers:
        rules = router.rules
        if (
            not rules.state.is_over
            and rules.state.status is not ExperimentStatus.DRAFT
            and rules.is_in_share(unit, cluster_id)
        ):
            return router
    return next((router for router in routers if router.rules.state.status is not ExperimentStatus.DRAFT), routers[-1])


def remembering_experiment(routers: Iterable[Router], unit: str) -> Router | None:
    """Return the first of these experiments in which this replica remembers the unit, None if there is none."""
    return next((router for router in routers if unit in router.remembered.units), None)


def draining_experiments(routers: Sequence[Router], entered: Router) -> list[Router]:
    """Return the older experiments whose units may still be active."""
    now = time.time()
    newest = entered.created
    return [r for r in routers if r is not entered and r.created < newest and now - newest < DRAIN_S]


def _unknown(name: str, names: Collection[str]) -> UnknownExperimentError:
    instead = did_you_mean(name, names) if names else "; there is none yet"
    return UnknownExperimentError(f"unknown experiment {name[:MAX_COMPARED]!r}{instead}", "experiment")
