"""The standings of a sweep's trials keep their orders while trials arrive, continue and fail."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.search.schedulers import TrialStanding, TrialStandings, TrialVerdicts, make_scheduler

REDUCTION, RUNGS = 2, (100, 200, 400)
CONFIG = parse_config(
    SweepConfig,
    {
        "name": "s",
        "run": {"env": {"id": "toys.envs:countdown"}, "train": {"total_steps": 800}},
        "space": {"hyper.lr": {"grid": [0.01, 0.02]}},
        "scheduler": {"kind": "asha", "grace": RUNGS[0], "reduction": REDUCTION},
    },
)


def promote(trials: Mapping[int, TrialStanding], more: int | None) -> TrialVerdicts:
    """The verdicts of ASHA, with all trials ranked anew at every rung."""
    continuing: set[int] = set()
    size = len(trials) + (more or 0)
    for rung in RUNGS:
        arrived = sorted((-trial.scores[rung], number) for number, trial in trials.items() if rung in trial.scores)
        places = len(arrived) // REDUCTION
        if more is not None:
            places = max(1, size // REDUCTION) - (size - len(arrived))
            size = max(1, size // REDUCTION)
        best = [trials[number] for _, number in arrived[: max(0, places)]]
        continuing |= {trial.number for trial in best if trial.state == "waiting" and trial.at == rung}
    waiting = {number for number, trial in trials.items() if trial.state == "waiting"}
    idle = not continuing and more == 0 and all(trial.state != "running" for trial in trials.values())
    return TrialVerdicts(frozenset(continuing), frozenset(waiting if idle else ()))


changes = st.tuples(
    st.integers(0, 9),
    st.sampled_from(["running", "waiting", "ended", "failed"]),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=len(RUNGS)),
)


@given(st.lists(changes, max_size=40), st.sampled_from([None, 0, 1, 5]))
def test_asha_decides_from_orders_that_are_kept_as_from_trials_that_are_ranked_anew(changes, more):
    standings = TrialStandings()
    plain: dict[int, TrialStanding] = {}
    for number, state, scores in changes:
        plain.pop(number, None)
        if state == "failed":
            standings.remove(number)
        else:
            trial = TrialStanding(number, state, dict(zip(RUNGS, scores, strict=False)))
            plain[number] = trial
            standings.put(trial)
        assert dict(standings) == plain
        assert make_scheduler(CONFIG, 800).decide(standings, more) == promote(plain, more)
    assert make_scheduler(CONFIG, 800).decide(TrialStandings(plain.values()), more) == promote(plain, more)
