"""The winner of a sweep, and the bundle that is registered for it."""

from collections.abc import Callable
from pathlib import Path

from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.tuning.folder import read_rows, trial_folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, median_seed, ranked_trials


def choose_winner(
    config: SweepConfig,
    records: SweepRecords,
    register: Callable[[TrialRecord, Path], str],
    warn: Callable[[str], None],
) -> TrialRecord | None:
    """Note the first trial in rank as the sweep's winner, register a bundle of it, and return its record.

    The bundle is that of the seed with the median score. `register(record, bundle)` returns the registered version, or
    an empty text. Damaged rows, by which no seed can be chosen, end no sweep: `warn` gets a line about them. Returns None
    if no trial has a result.
    """
    candidates = ranked_trials(records, config.metric)
    if not candidates:
        return None
    winner = candidates[0]
    home = trial_folder(config.storage, config.name, winner.number)
    if records.winner != winner.number:
        records.winner, records.winner_seed, records.winner_model = winner.number, None, ""
    try:
        records.winner_seed = median_seed(read_rows(home), config.seeds, config.metric[0])
    except (OSError, MarlRayError) as error:
        warn(f"no bundle of the winner, trial {winner.number:04d}, can be chosen: {one_line(error)}")
        return winner
    bundle = f"bundles/seed-{records.winner_seed}"
    if home.exists(bundle):
        with home.local(bundle) as local:
            assert local is not None
            records.winner_model = register(winner, local)
    return winner
