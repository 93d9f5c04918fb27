"""The arms of one experiment that are loaded here, and which of them answers for which arm.

A request takes this value once and is answered by it to its end, because a thread may load or drop arms meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence

from marl_ray.closing import close_all
from marl_ray.config import ExperimentConfig
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.serving.arms.protocol import AnyBundle, Arm, TextArm, is_text
from marl_ray.serving.errors import UnavailableError, WrongKindError


class LoadedArms(Mapping[str, Arm | TextArm]):
    """Name -> loaded arm. Never changed: other arms, or another state of the experiment, are another value."""

    __slots__ = ("_answering_arms", "_arms", "_config", "is_text", "state")

    def __init__(self, config: ExperimentConfig, arms: Mapping[str, Arm | TextArm], state: AssignmentState):
        """`arms` are those of the config's arms that are loaded here; `state` says which arm is in production."""
        self._config = config
        self._arms = arms
        self.state = state
        """The state of the experiment in which these arms answer."""
        self.is_text = any(is_text(arm.bundle) for arm in arms.values())
        """True if the arms are language models; no experiment has arms of two kinds."""
        orders = {arm: dict.fromkeys((arm, state.production, state.control)) for arm in config.arms}
        self._answering_arms = {arm: [name for name in order if name in arms] for arm, order in orders.items()}

    def __getitem__(self, name: str) -> Arm | TextArm:
        """Return the loaded arm of this name. Raises KeyError if it is not loaded."""
        return self._arms[name]

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of the loaded arms."""
        return iter(self._arms)

    def __len__(self) -> int:
        """Return the number of loaded arms."""
        return len(self._arms)

    def in_state(self, state: AssignmentState) -> "LoadedArms":
        """Return the same arms as they answer in another state of the experiment."""
        return LoadedArms(self._config, self._arms, state)

    def answering_arms(self, arm: str) -> Sequence[str]:
        """Return the loaded arms that may answer for a session of this arm of the config, in order of preference."""
        return self._answering_arms[arm]

    def first_answering_arm(self, arm: str) -> str:
        """Return the first of `answering_arms`. Raises UnavailableError if there is none."""
        for name in self._answering_arms[arm]:
            return name
        raise UnavailableError(f"no arm of experiment {self._config.name!r} is loaded here")

    def actor(self, name: str) -> Arm:
        """Return the loaded arm of this name, which acts. Raises KeyError if it is not loaded.

        Raises WrongKindError if it writes text.
        """
        arm = self._arms[name]
        if is_text(arm.bundle):
            raise self._wrong_kind_error("token", "actor_critic", "experiment")
        return arm

    def writer(self, name: str) -> TextArm:
        """Return the loaded arm of this name, which writes text. Raises KeyError if it is not loaded.

        Raises WrongKindError if it acts.
        """
        arm = self._arms[name]
        if not is_text(arm.bundle):
            raise self._wrong_kind_error("actor_critic", "token", "experiment")
        return arm

    def bundle_of(self, arm: str) -> AnyBundle:
        """Return the bundle of the first arm that may answer for this arm.

        Raises UnavailableError if none is loaded.
        """
        return self._arms[self.first_answering_arm(arm)].bundle

    def actor_bundle_of(self, arm: str, field: str = "experiment") -> ActorCriticBundle:
        """Return the bundle of `bundle_of`, which must hold actor-critics.

        Raises WrongKindError naming the field if it holds language models, and as `bundle_of` does.
        """
        bundle = self.bundle_of(arm)
        if is_text(bundle):
            raise self._wrong_kind_error("token", "actor_critic", field)
        return bundle

    def _wrong_kind_error(self, kind: str, expected: str, field: str) -> WrongKindError:
        message = f"{self._config.served_as!r} serves {kind} policies, expected {expected} policies"
        return WrongKindError(message, field)

    def close(self) -> None:
        """Release what the arms hold in this process."""
        close_all(arm.close for arm in self._arms.values())
