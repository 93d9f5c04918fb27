"""`marl_ray.evaluate` without a benchmark: whole episodes of a bundle's actor-critics."""

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marl_ray.config import resolve_tracking_uri
from marl_ray.config.random_streams import MAX_COPIES, MAX_EVALUATION_STEPS, MAX_SEED
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.evaluation.options import EpisodeOptions
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from marl_ray.config import RunConfig
    from marl_ray.policies.bundles.manifest import Manifest


@dataclass(frozen=True)
class EpisodeScores:
    """The scores of whole episodes, in the order of their starts."""

    returns: list[float]
    """Return of each episode: its sum of rewards, averaged over the agents."""
    lengths: list[int]
    """Environment steps of each episode."""
    truncated: int
    """Number of episodes that were truncated at `max_steps`."""

    @property
    def score(self) -> float:
        """Mean return."""
        return sum(self.returns) / len(self.returns)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean return; None for a single episode."""
        from marl_ray.evaluation.student_interval import student_interval

        return student_interval(self.returns) if len(self.returns) > 1 else None

    def __repr__(self) -> str:
        return f"<EpisodeScores {self}>"

    def __str__(self) -> str:
        interval = "" if self.interval is None else " [{:.3f}, {:.3f}]".format(*self.interval)
        steps = sum(self.lengths) / len(self.lengths)
        return f"score {self.score:.3f}{interval} of {len(self.returns)} episodes, {steps:.1f} steps each"


def evaluate_episodes(options: EpisodeOptions) -> EpisodeScores:
    """Play whole episodes of the environment that the bundle was trained in, and return their scores.

    An episode is a function of (weights, seed, number), so two bundles meet the same starts. Raises FieldError naming
    the option with a wrong value. Raises MarlRayError for a bundle of language models, and if the environment's agents
    or spaces are not the bundle's.
    """
    from marl_ray.policies.bundles.manifest import Manifest, local_folder, read_manifest
    from marl_ray.training.evaluation.play_bundle import play_bundle

    for name, maximum in (("episodes", MAX_COPIES), ("seed", MAX_SEED), ("max_steps", MAX_EVALUATION_STEPS)):
        value = getattr(options, name)
        if value > maximum:
            raise FieldError(name, f"expected a whole number of at most {maximum}, got {value}")
    with local_folder(options.policy, resolve_tracking_uri(options.tracking_uri)) as folder:
        manifest = read_manifest(folder)
        if not isinstance(manifest, Manifest):
            raise MarlRayError(
                f"policy: {options.policy} holds language models; expected actor-critics, or a benchmark"
            )
        try:
            run = _run_config(manifest, options.env)
            episodes = play_bundle(run, folder, options.episodes, options.seed, options.max_steps, options.greedy)
        except FieldError as error:
            if not (error.field.startswith("team.") and error.field.endswith(".bundle")):
                raise
            raise FieldError("policy", f"{options.policy}: {error.message}") from error  # the team is the bundle's own
    return EpisodeScores(
        [episode.episode_return for episode in episodes],
        [episode.length for episode in episodes],
        sum(episode.truncated for episode in episodes),
    )


def _run_config(manifest: "Manifest", options: Mapping[str, object]) -> "RunConfig":
    """Return the config of a run whose team has the networks of a bundle.

    The run's environment is the bundle's, with these options changed.
    """
    from marl_ray.config import RunConfig, parse_config

    env = manifest.lineage.env
    team: JsonObject = {name: {"agents": [], "network": part.network} for name, part in manifest.policies.items()}
    for agent, name in manifest.agents.items():
        team[name]["agents"].append(glob.escape(agent))
    team = {name: part | {"network": part["network"].model_dump(mode="json")} for name, part in team.items()}
    data = {
        "name": "episodes",
        "algorithm": "ippo",
        "env": env | {"kwargs": {**env.get("kwargs", {}), **options}},
        "team": team,
    }
    return parse_config(RunConfig, data, source="bundle")
