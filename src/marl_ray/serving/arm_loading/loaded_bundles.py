"""Loading of bundles: a replica loads those of the arms that serve, each content once."""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from marl_ray.config import ExperimentConfig, GatewayConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import OPEN_STATUSES, ExperimentRecord
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.json_types import JsonMapping
from marl_ray.policies.actor_critic.spaces import space_to_json
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import REGISTRY_PREFIX, pin_reference
from marl_ray.serving.arm_loading.needed_arms import needed_arms, served_here
from marl_ray.serving.arms.external.model import ExternalModel, external_model
from marl_ray.serving.arms.protocol import AnyBundle, is_text

_log = logging.getLogger(__name__)


class BundleCache:
    """The bundles of a process, safe to use from several threads.

    Each content is loaded once, however many experiments and references name it, and stays only while somebody uses it.
    """

    def __init__(self, tracking_uri: str | None = None):
        self._tracking_uri = tracking_uri
        self._loaded: WeakValueDictionary[str, AnyBundle] = WeakValueDictionary()
        self._digests: dict[str, str] = {}
        """Reference into the registry, where versions never change -> digest."""
        self._lock = threading.Lock()

    def load(self, reference: str, digest: str | None = None) -> AnyBundle:
        """Return the bundle of a reference, read unless its content is already loaded.

        `digest` is the expected one, None if unknown. Raises MarlRayError if the bundle is missing or malformed, or
        has another digest.
        """
        content = digest or self._digests.get(reference)
        loaded = self._loaded.get(content) if content is not None else None
        if loaded is not None:
            return loaded
        bundle = load_bundle(reference, self._tracking_uri, digest)
        with self._lock:
            if reference.startswith(REGISTRY_PREFIX):
                self._digests[reference] = bundle.digest
            return self._loaded.setdefault(bundle.digest, bundle)


@dataclass(frozen=True)
class LoadedExperiment:
    """An experiment whose needed bundles are loaded."""

    config: ExperimentConfig
    bundles: Mapping[str, AnyBundle]
    """Arm -> its bundle, for the needed arms."""
    stored_digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Arm -> `digest` and, where it is known, `weights_sha256` that the store has of its bundle."""

    def stored_config(self) -> dict[str, object]:
        """Return the config as the store keeps it.

        The stored config has the salt in force, and the digests of each arm's bundle and weights.
        """
        data = self.config.model_dump(mode="json")
        data["salt"] = self.config.salt or self.config.name
        data["control"] = next(iter(self.config.arms))
        for arm in self.config.arms:
            bundle = self.bundles.get(arm)
            if bundle is None:
                data["arms"][arm] |= self.stored_digests[arm]
            else:
                data["arms"][arm] |= {"digest": bundle.digest, "weights_sha256": bundle.manifest.weights_sha256}
                if isinstance(bundle, ExternalModel):
                    data["arms"][arm] |= {"agents": bundle.agents}
        return data


def load_arms(
    config: ExperimentConfig, arms: Iterable[str], bundles: BundleCache, stored: Mapping[str, JsonMapping]
) -> tuple[dict[str, AnyBundle], dict[str, MarlRayError]]:
    """Load the bundles of these arms.

    Returns the bundles, and the reason for each arm whose bundle cannot be loaded. `stored` has the store's digests
    that the bundles must match. External models play the agents of the other arms.
    """
    loaded: dict[str, AnyBundle] = {}
    missing: dict[str, MarlRayError] = {}
    for arm in sorted(arms, key=lambda arm: config.arms[arm].bundle is None):
        arm_config = config.arms[arm]
        stored_arm = stored.get(arm, {})
        try:
            if arm_config.bundle is not None:
                loaded[arm] = bundles.load(arm_config.bundle, stored_arm.get("digest"))
            else:
                agents = stored_arm.get("agents") or next((other.agents for other in loaded.values()), None)
                loaded[arm] = external_model(str(arm_config.url), str(arm_config.model), agents)
        except MarlRayError as error:
            missing[arm] = MarlRayError(f"experiments.{config.name}.arms.{arm}: {error}")
    return loaded, missing


def load_all_arms(config: ExperimentConfig, bundles: BundleCache) -> LoadedExperiment:
    """Load a new experiment with all of its arms.

    Raises MarlRayError naming the arm if one cannot be loaded or used.
    """
    loaded, missing = load_arms(config, config.arms, bundles, {})
    for error in missing.values():
        raise error
    check_arms(config, loaded)
    return LoadedExperiment(config, loaded)


def pin_aliases(config: ExperimentConfig, tracking_uri: str | None) -> ExperimentConfig:
    """Return the experiment with the versions that its arms' aliases (`models:/name@best`) have now.

    What is served must not change when an alias moves. Raises MarlRayError naming the arm.
    """
    arms = {}
    for name, arm in config.arms.items():
        try:
            bundle = None if arm.bundle is None else pin_reference(arm.bundle, tracking_uri)
            arms[name] = arm.model_copy(update={"bundle": bundle})
        except MarlRayError as error:
            raise MarlRayError(f"experiments.{config.name}.arms.{name}: {error}") from error
    return config.model_copy(update={"arms": arms})


def load_configured(config: GatewayConfig, store: ExperimentStore, bundles: BundleCache) -> list[LoadedExperiment]:
    """Return the experiments of a gateway's config, each with the arms that serve.

    Raises MarlRayError naming the arm if a bundle of a new experiment cannot be loaded. If the store knows the
    experiment, the arm is left out and another one answers for it.
    """
    pinned = [pin_aliases(experiment, config.tracking_uri) for experiment in config.experiments]
    states = store.states()
    arms_of = needed_arms(served_here(states, [experiment.name for experiment in pinned]), time.time())
    loaded = []
    for experiment in pinned:
        name = experiment.name
        record = store.read(name) if name in states else None
        loaded.append(
            load_all_arms(experiment, bundles)
            if record is None
            else _load_stored(experiment, record, arms_of[name], bundles)
        )
    return loaded


def check_configured(config: GatewayConfig, store: ExperimentStore) -> None:
    """Raise MarlRayError if an experiment of the config could not be served.

    That is a new one that lacks an arm, or one that takes traffic and has lost the arm that answers for all others.
    """
    states = store.states()
    for experiment in load_configured(config, store, BundleCache(config.tracking_uri)):
        state = states.get(experiment.config.name)
        if state is not None and state.status in OPEN_STATUSES and state.control not in experiment.bundles:
            raise MarlRayError(
                f"experiments.{experiment.config.name}.arms.{state.control}: the control's bundle "
                f"{experiment.config.arms[state.control].reference!r} cannot be loaded, and the experiment is {state.status}"
            )


def _load_stored(
    config: ExperimentConfig, record: ExperimentRecord, needed: Collection[str], bundles: BundleCache
) -> LoadedExperiment:
    stored_arms = record.config["arms"]
    stored = {
        name: {
            key: stored_arms[name][key] for key in ("digest", "weights_sha256", "agents") if key in stored_arms[name]
        }
        for name, arm in config.arms.items()
        if name in stored_arms
        and all(stored_arms[name].get(key) == getattr(arm, key) for key in ("bundle", "url", "model"))
    }
    # Without a check of digests: if the content of a folder has changed, the digest in the store decides later. But the
    # agents of an external model are those that were stored when the experiment began.
    agents = {name: {"agents": arm["agents"]} for name, arm in stored.items() if "agents" in arm}
    arms_to_load = [arm for arm in config.arms if arm in needed or arm not in stored]
    loaded, missing = load_arms(config, arms_to_load, bundles, agents)
    for arm, error in missing.items():
        if arm not in stored:
            raise error
        _log.error("%s; another arm answers for it", error)
    check_arms(config, loaded)
    return LoadedExperiment(config, loaded, stored)


def check_arms(config: ExperimentConfig, bundles: Mapping[str, AnyBundle]) -> None:
    """Raise MarlRayError naming the arm if two of an experiment's bundles cannot replace each other.

    The bundles must not differ in kind, agents, observations or actions: a request is made before its arm is known, so
    every arm must understand it.
    """
    if not bundles:
        return
    control = next((arm for arm in config.arms if arm in bundles), "")
    expected = _interface_of(bundles[control])
    for arm, bundle in bundles.items():
        if is_text(bundle) != is_text(bundles[control]):
            kinds = ("language models", "actor-critics")
            has, needs = kinds if is_text(bundle) else kinds[::-1]
            raise MarlRayError(f"experiments.{config.name}.arms.{arm}: holds {has}, arm {control!r} holds {needs}")
        interface = _interface_of(bundle)
        for agent in sorted({*expected, *interface}):
            if expected.get(agent) != interface.get(agent):
                raise MarlRayError(
                    f"experiments.{config.name}.arms.{arm}: agent {agent!r} has other spaces than in arm {control!r}"
                    if agent in expected and agent in interface
                    else f"experiments.{config.name}.arms.{arm}: plays agents {', '.join(interface)}, "
                    f"arm {control!r} plays {', '.join(expected)}"
                )


def _interface_of(bundle: AnyBundle) -> dict[str, tuple[object, object]]:
    if is_text(bundle):
        return dict.fromkeys(bundle.agents, ("text", "text"))
    parts = bundle.manifest.policies
    return {
        agent: (space_to_json(bundle.policies[policy].observation_space), parts[policy].action_space)
        for agent, policy in bundle.agents.items()
    }
