"""`marl-ray experiment plan` and `analyse`: the size that an experiment needs, and its analysis."""

from typing import Annotated

import typer

from marl_ray.cli.documents.output import Json, show
from marl_ray.cli.options import LOCAL_DATABASE, DatabaseUrl, ExperimentName, named_as_options
from marl_ray.errors import FieldError


@named_as_options()
def plan_experiment(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="An experiment whose config, outcomes and traffic fill what is not given."
        ),
    ] = None,
    effect: Annotated[
        float | None,
        typer.Option(help="Gain to prove beyond the margin, in units of the outcome; NAME's margin by default."),
    ] = None,
    sd: Annotated[
        float | None, typer.Option(help="Standard deviation of the outcomes; that of NAME's control by default.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Error probability; NAME's or 0.05 by default.")] = None,
    power: Annotated[float, typer.Option(help="Power: probability of detecting the effect.")] = 0.8,
    share: Annotated[
        float | None, typer.Option(help="Treatment's share of the units of both arms; NAME's or 0.5 by default.")
    ] = None,
    bounds: Annotated[
        str | None,
        typer.Option(metavar="LOW,HIGH", help="Bounds of the outcome, for the exact test; NAME's by default."),
    ] = None,
    database: DatabaseUrl = LOCAL_DATABASE,
    as_json: Json = False,
) -> None:
    """Compute how many units an experiment needs.

    One look at the end and the test that decides at every look need different numbers; with NAME it also says days.
    """
    from marl_ray.experiments.designs.planning import sample_sizes
    from marl_ray.serving.administration.analysis import PlanningNumbers, read_planning_numbers

    defaults = PlanningNumbers() if name is None else read_planning_numbers(database, name)
    inputs = {"effect": effect if effect is not None else defaults.effect, "sd": sd if sd is not None else defaults.sd}
    for option, value in inputs.items():
        if value is None:
            reason = "" if name is None else f"; experiment {name!r} does not say it yet"
            raise FieldError(option, f"expected a number{reason}")
    outcome_bounds = _parse_bounds(bounds) if bounds is not None else defaults.bounds
    planned = sample_sizes(
        effect=float(inputs["effect"] or 0.0),
        sd=float(inputs["sd"] or 0.0),
        alpha=alpha if alpha is not None else defaults.alpha,
        power=power,
        share=share if share is not None else defaults.share,
        min_outcomes=defaults.min_outcomes,
        bounds=outcome_bounds,
    )
    test = "exact" if outcome_bounds is not None else "sequential"
    rows = (
        ("one look at the end (Welch), fixed beforehand", planned.fixed),
        (f"{test} test at every look, in half of the experiments", planned.median),
        (f"{test} test at every look, in {power:.0%} of them", planned.sure),
    )
    head = f"effect {inputs['effect']:g}, sd {inputs['sd']:g}: units of treatment and control together"
    lines = [f"  {text:<58} {_units_text(units):>14}{_days_text(units, defaults.per_day)}" for text, units in rows]
    document = {**inputs, "test": test, "power": power, "per_day": defaults.per_day}
    show(as_json, document | {"units": planned._asdict()}, [head, *lines])


def _parse_bounds(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise FieldError("bounds", f"expected LOW,HIGH, got {text!r}") from None
    return low, high


def _units_text(units: int | None) -> str:
    return "over a billion" if units is None else f"{units:,}"


def _days_text(units: int | None, per_day: float | None) -> str:
    if units is None or not per_day:
        return ""
    return f"  {units / per_day:,.1f} days"


@named_as_options()
def analyse(
    name: ExperimentName,
    covariate: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="A metric that was fixed before the session met its arm, for CUPED."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="A further metric to compare; A/B is the sum of A over the sum of B."),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Level of the tests; the experiment's own by default.")] = None,
    database: DatabaseUrl = LOCAL_DATABASE,
    as_json: Json = False,
) -> None:
    """Analyse an experiment once, at its end.

    It makes Welch's tests with Holm's correction, CUPED, and exact bounds, of the outcome and of the guardrails, over
    the sessions whose windows are over.
    """
    from marl_ray.serving.administration.analysis import analyse

    result = analyse(database, name, covariate, tuple(metric or ()), alpha)
    show(as_json, result, result.lines())
