"""`marl_ray.sweep`: many runs, compared over seeds."""

from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.api.calls import ConfigSource, data_of, named_arguments, ray_of_call, short_interrupt

if TYPE_CHECKING:
    from marl_ray.config.sweep import SweepConfig
    from marl_ray.tuning.running.driver import SweepResult


@short_interrupt()
@named_arguments
def sweep(config: ConfigSource, *, retry: bool = False, **changes: object) -> "SweepResult":
    """Train many configurations and find the best.

    A sweep of this name that was interrupted continues. `config` is a YAML file or plain data; `changes` are sections
    or keys of it, such as `seeds=3`. `retry` restarts trials that failed, were lost or were refused. The result's
    `records` has every trial with its values, scores and bundle, `winner` and `winner_model`; `report` is a page of
    HTML. Raises MarlRayError if the sweep cannot run at all.
    """
    from marl_ray.config import parse_config
    from marl_ray.config.sweep import SweepConfig, read_sweep, with_run_file

    data, source = data_of(config, changes, read_sweep)
    return check_and_sweep(parse_config(SweepConfig, with_run_file(data, Path()), source=source), retry)


def check_and_sweep(config: "SweepConfig", retry: bool) -> "SweepResult":
    """Check a sweep before any cluster starts, and run it to its end. Raises MarlRayError."""
    from marl_ray.tuning.running.driver import check_sweep, run_sweep

    check_sweep(config)
    return run_sweep(config, retry, ray_of_call)
