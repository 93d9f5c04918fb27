"""The experiments that one replica has open, with their arms and the bundles that it has loaded."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np

from marl_ray.closing import close_all
from marl_ray.config import ArmConfig, ExperimentConfig, GatewayConfig
from marl_ray.config.run.model import DEFAULT_ENGINE
from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.serving.arm_loading.loaded_bundles import BundleCache, LoadedExperiment
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher
from marl_ray.serving.arms.external.arm import ExternalArm
from marl_ray.serving.arms.external.model import ExternalModel
from marl_ray.serving.arms.protocol import AnyBundle, Arm, TextArm, is_text
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.routing.endpoints import Endpoints
from marl_ray.serving.routing.experiment.router import Router

Host = Callable[[AnyBundle, str, ArmConfig], Arm | TextArm]
"""Starts an arm in its own deployment, given its bundle, the bundle's reference and the arm's config."""


class LiveExperiments:
    """The experiments, arms and bundles of one replica."""

    def __init__(
        self,
        config: GatewayConfig,
        store: ExperimentStore,
        exposures: ExposureLog,
        bundles: BundleCache,
        noise: np.random.Generator,
        host: Host | None,
    ):
        """`noise` draws actions; `host` starts arms with `placement: deployment`."""
        self.config = config
        self.store = store
        self.exposures = exposures
        self.bundles = bundles
        self.endpoints = Endpoints()
        self.models: dict[str, AnyBundle] = {}
        """Reference into the registry -> bundle that was loaded before any experiment named it; versions never change.
        Several threads add some, and the follower's alone drops some; readers copy it."""
        self._noise = noise
        self._host = host
        self._passes: dict[str, PassBatcher] = {}
        """Experiment -> its arms' forward passes."""

    def keep_model(self, reference: str, bundle: AnyBundle) -> None:
        """Keep a bundle that was loaded before any experiment named it."""
        self.models[reference] = bundle

    def drop_models(self, references: Iterable[str]) -> None:
        """Keep these bundles no longer. Only the follower calls it."""
        for reference in references:
            del self.models[reference]

    def open(
        self,
        experiment: LoadedExperiment,
        actor: str = "config",
        reason: str = "opened",
        succeeds: str | None = None,
        **more: object,
    ) -> Router:
        """Register an experiment with the store and route to it, which blocks.

        `succeeds` names an experiment that is stopped when this one begins (see `ExperimentStore.open`), and `more` is
        stored beside its config. Raises MarlRayError if the stored experiment forbids it, or if an arm
        cannot be hosted.
        """
        arms: dict[str, Arm | TextArm] = {}
        try:
            for arm, bundle in experiment.bundles.items():
                arms[arm] = self.start_arm(experiment.config, arm, bundle)
            stored_config = experiment.stored_config() | more
            self.store.open(experiment.config.name, stored_config, actor=actor, reason=reason, succeeds=succeeds)
            state = self.store.assignment_state(experiment.config.name)
        except BaseException:
            close_all(new_arm.close for new_arm in arms.values())
            raise
        return self.take_in(experiment.config, state, arms)

    def take_in(
        self, config: ExperimentConfig, state: AssignmentState, arms: Mapping[str, Arm | TextArm] = MappingProxyType({})
    ) -> Router:
        """Route to a stored experiment whose given arms are loaded."""
        return self.endpoints.add(Router(config, arms, state, self.store, self.exposures))

    def start_arm(self, experiment: ExperimentConfig, arm: str, bundle: AnyBundle) -> Arm | TextArm:
        """Start an arm of an experiment from its bundle. Blocks while a deployment starts. Raises MarlRayError."""
        config = experiment.arms[arm]
        if isinstance(bundle, ExternalModel):
            return ExternalArm(bundle, config, self.config.request_timeout_s / 2)
        if config.engine != DEFAULT_ENGINE and not is_text(bundle):
            where = f"experiments.{experiment.name}.arms.{arm}.engine={config.engine}"
            raise MarlRayError(f"{where}: {config.reference!r} holds actor-critics, expected language models")
        if experiment.placement == "replica":
            if is_text(bundle):
                from marl_ray.serving.arms.text.batcher import TextBatcher  # transformers takes seconds to import

                # The deadline must leave the control time to answer if the arm hangs.
                return TextBatcher(bundle, self.config.max_batch, self.config.request_timeout_s / 2, config.engine)
            passes = self._passes.setdefault(experiment.name, PassBatcher(self.config.max_batch, self._noise))
            return ArmBatcher(bundle, passes)
        if self._host is None:
            raise MarlRayError(
                f"experiments.{experiment.name}.placement: deployment needs Ray Serve; expected replica here"
            )
        return self._host(bundle, config.reference, config)
