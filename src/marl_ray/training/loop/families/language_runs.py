"""The family of runs of language models; `RunFamily` documents the functions."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pettingzoo import AECEnv, ParallelEnv
from torch import Tensor

from marl_ray.config import RunConfig
from marl_ray.envs.registry import make_env
from marl_ray.policies.agreement import all_gather_values
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch, CollectPlan
from marl_ray.rollout.served.collector import ResponseBlock, ServedCollector
from marl_ray.rollout.text.collector import TextBatch, TextCollector
from marl_ray.rollout.text.transcripts import Transcript, mean_metrics
from marl_ray.training.evaluation.held_out import HeldOutPlayer
from marl_ray.training.imitation.fine_tuning import fine_tune
from marl_ray.training.loop.callbacks import Metrics, RunCallbacks
from marl_ray.training.team.language_checks import check_language
from marl_ray.training.team.members import Team
from marl_ray.training.texts import served_data
from marl_ray.training.texts.served_data import PolicyReader

BUILDING = "loading the models"


def check(config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> None:
    """Build the models without memory for their weights, and read demonstrations, data and benchmarks."""
    policies = check_language(config, env, agents)
    if config.evaluation.benchmarks:
        from marl_ray.training.evaluation.benchmarks import read_benchmarks

        read_benchmarks(config, agents, policies)


def imitate(config: RunConfig, env: ParallelEnv, team: Team, callbacks: RunCallbacks) -> None:
    """Fit the demonstrations."""
    callbacks.phase("fitting the demonstrations")
    fine_tune(config, env, team, callbacks.row)


def read_data(config: RunConfig, team: Team) -> dict[str, list[ResponseBlock]] | None:
    """Return the run's `data` as token ids of its policies; None without `data`."""
    if config.data is None:
        return None
    readers = {
        name: PolicyReader(model.lm, model.tokenizer) for name, model in cast(Mapping[str, Any], team.models).items()
    }
    return served_data.read_data(config, team.agents, readers)


def make_collector(
    config: RunConfig,
    env: ParallelEnv,
    agents: dict[str, list[str]],
    copies: range,
    plan: CollectPlan,
    state: Mapping[str, object] | None,
    data: Mapping[str, Sequence[ResponseBlock]] | None,
) -> TextCollector:
    """Return the collector of texts, or of texts that were served."""

    def make() -> AECEnv:
        return cast(AECEnv, make_env(config.env, config.constraints))

    common = (make, agents, copies, plan, config.seed, config.cost_signals, state, all_gather_values)
    if data is None:
        return TextCollector(*common, config.train.curriculum)
    return ServedCollector(*common, data, config.train.env_copies)


def starts_player(
    config: RunConfig, env: ParallelEnv, agents: Mapping[str, Sequence[str]], collector: BatchCollector
) -> HeldOutPlayer:
    """Return a player of held-out tasks, with the collector that training uses."""
    assert isinstance(collector, TextCollector)
    return HeldOutPlayer(config, collector)


def response_metrics(batch: CollectedBatch) -> tuple[Metrics, list[dict[str, object]]]:
    """Return the metrics of the responses, and the drawn episodes as text.

    The metrics are the tokens that are trained on, the tokens of their prompts, and means of roles and environment.
    """
    assert isinstance(batch, TextBatch)
    responses = [rows for rows in batch.trajectories.values() if rows.prompts is not None]
    trained = sum(int(rows.mask.sum()) for rows in responses)
    prompts = sum(int((cast(Tensor, rows.prompts) >= 0).sum()) for rows in responses)
    parts = all_gather_values((trained, prompts, batch.sums, batch.transcripts))
    counts = {
        "tokens": float(sum(part[0] for part in parts)),
        "prompt_tokens": float(sum(part[1] for part in parts)),
    }
    return counts | mean_metrics(part[2] for part in parts), [
        _to_plain(transcript) for part in parts for transcript in part[3]
    ]


def _to_plain(transcript: Transcript) -> dict[str, object]:
    return transcript._asdict() | {"lines": [line._asdict() for line in transcript.lines]}
