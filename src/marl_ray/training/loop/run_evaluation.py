"""Evaluations and benchmarks of a run's current weights, and the score that selects the best."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from marl_ray.config import RunConfig
from marl_ray.training.checkpoints.run_state import RunState
from marl_ray.training.evaluation.fixed_starts import Evaluator, StartSet
from marl_ray.training.evaluation.recent_episodes import RecentEpisodes
from marl_ray.training.evaluation.schedule import first_wait_steps, next_wait_steps
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.loop.reports.phase_clock import PhaseClock
from marl_ray.training.team.members import Team

if TYPE_CHECKING:  # the import takes seconds, and actor-critics do not need it
    from marl_ray.policies.language.token_policy import TokenPolicy
    from marl_ray.training.evaluation.benchmarks import RunBenchmark

UNKNOWN_SCORE = -1e12
"""Score of weights that were not evaluated; it is below the score of all that were."""


def is_better(score: float, best: float) -> bool:
    """Return True if weights of this score take the place of the best so far.

    Of equal scores the earlier weights stay: nothing shows that later ones are better, and a policy may have collapsed
    since. Where nothing is scored, the newest weights count.
    """
    return score > best or score == best == UNKNOWN_SCORE


def read_run_benchmarks(config: RunConfig, team: Team, state: RunState) -> "list[RunBenchmark]":
    """Return the run's benchmarks, whose answers the team writes.

    Adds digests to the `state` that lacks them. Raises as `read_benchmarks` and `check_unchanged` do.
    """
    if not config.evaluation.benchmarks:
        return []
    from marl_ray.training.evaluation.benchmarks import check_unchanged, read_benchmarks

    models = cast("Mapping[str, TokenPolicy]", team.models)
    benchmarks = read_benchmarks(config, team.agents, models, team.engines)
    check_unchanged(benchmarks, state.benchmarks)
    return benchmarks


class RunEvaluation:
    """Evaluates and benchmarks a run's current weights when that is due, and scores them.

    Every worker makes the same calls. Nothing that training reads changes.
    """

    def __init__(
        self,
        config: RunConfig,
        players: Callable[[], Mapping[str, Any]],
        evaluator: Evaluator,
        benchmarks: "Sequence[RunBenchmark]",
        recent: RecentEpisodes,
        clock: PhaseClock,
        state: RunState,
    ):
        """`players` returns the players of the current weights; `state` is that of the run, which evaluations read and set.

        The clock has the phases `evaluation` and `benchmarks` if the run has any of them.
        """
        self.config, self.players, self.recent, self.clock = config, players, recent, clock
        self.evaluator, self.benchmarks, self.state = evaluator, benchmarks, state
        self.unsaved_score: float | None = None
        """Score of the current weights, if they were evaluated and are not saved yet."""
        self.has_unsaved_benchmark = False
        """True if a benchmark of the current weights was measured that is in no checkpoint yet."""

    @property
    def is_best(self) -> bool:
        """True if the current weights were evaluated, are not saved yet, and score more than all saved ones."""
        return self.unsaved_score is not None and is_better(self.unsaved_score, self.state.best_score)

    @property
    def save_due(self) -> bool:
        """True if the current weights must be saved. A run that continues from a checkpoint measures no benchmark again."""
        return self.is_best or self.has_unsaved_benchmark

    def begin(self) -> Metrics:
        """Evaluate the weights that training starts from, and measure the benchmarks, if there are any.

        Returns the metrics.
        """
        metrics: Metrics = {}
        if self.config.has_evaluations:
            metrics, cost = self.evaluate()
            steps = self.state.steps
            self.state.evaluate_at = steps + first_wait_steps(self.config.train.total_steps - steps, cost)
        return metrics | self._measure(False)

    def step(self, ends: bool) -> Metrics:
        """Evaluate the new weights and measure the benchmarks where that is due, and wherever the run `ends`.

        The state counts the update of the new weights already. Returns the metrics.
        """
        self.unsaved_score = None
        metrics = self._evaluate_if_due(ends) if self.config.has_evaluations else {}
        return metrics | self._measure(ends)

    def _evaluate_if_due(self, ends: bool) -> Metrics:
        """Evaluate the current weights if that is due or the run `ends`, and return the metrics."""
        state, every = self.state, self.config.evaluation.every
        due = state.steps >= state.evaluate_at if every is None else state.iteration % every == 0
        if not due and not ends:
            return {}
        metrics, cost = self.evaluate()
        if due:  # an evaluation for another reason does not move the next one that is due
            state.evaluate_at = state.steps + next_wait_steps(self.config.train.total_steps, cost)
        return metrics

    def evaluate(self) -> tuple[Metrics, int]:
        """Evaluate the current weights.

        Returns metrics, and the steps that were played for them. If the score is the best so far, the weights are
        measured again on other episodes, for the metrics `best/...`.
        """
        players, steps = self.players(), self.state.steps
        with self.clock.phase("evaluation"):
            scored = self.evaluator.evaluate(players, StartSet.SELECTION, steps)
            self.unsaved_score = max(scored.score, UNKNOWN_SCORE)
            metrics, played = {f"eval/{key}": value for key, value in scored.metrics.items()}, scored.steps
            if self.is_best:
                confirmed = self.evaluator.evaluate(players, StartSet.CONFIRMATION, steps)
                metrics |= {f"best/{key}": value for key, value in confirmed.metrics.items()} | {"best/steps": steps}
                played += confirmed.steps
        return metrics, played

    def _measure(self, ends: bool) -> Metrics:
        """Measure the benchmarks that are due, or all where the run `ends`.

        Returns their metrics, and what training has taken so far.
        """
        state = self.state
        due = [benchmark for benchmark in self.benchmarks if ends or benchmark.is_due(state.iteration)]
        if not due:
            return {}
        from marl_ray.training.evaluation.benchmarks import curve_axes, measure

        with self.clock.phase("benchmarks"):
            metrics = measure(due, self.config.name, state.iteration)
        self.has_unsaved_benchmark = True
        return metrics | curve_axes(self.config, state.tokens, state.seconds)

    def score(self) -> float:
        """Return the number that chooses the best checkpoint.

        The number is the score of the evaluation of these weights or, without evaluations, of the recent episodes.
        """
        score = self.unsaved_score if self.config.has_evaluations else self.recent.score()
        return UNKNOWN_SCORE if score is None else max(score, UNKNOWN_SCORE)

    def note_saved(self) -> None:
        """Note that the current weights are saved, with all that was measured of them."""
        self.unsaved_score, self.has_unsaved_benchmark = None, False

    def close(self) -> None:
        """Release what only evaluations use."""
        self.evaluator.close()
