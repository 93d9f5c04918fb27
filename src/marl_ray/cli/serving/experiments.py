"""`marl-ray experiment`: a gateway's experiments, their design and their analysis."""

from pathlib import Path
from typing import Annotated

import typer

from marl_ray.cli.documents.output import Json, show
from marl_ray.cli.options import KEY_NEEDED, LOCAL_GATEWAY, ExperimentName, GatewayUrl
from marl_ray.cli.serving.designs import analyse, plan_experiment
from marl_ray.json_types import JsonObject

experiment_app = typer.Typer(help="Inspect and change a gateway's experiments.", no_args_is_help=True)
experiment_app.command("plan")(plan_experiment)
experiment_app.command("analyse")(analyse)


@experiment_app.command("create")
def experiment_create(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of one experiment.")],
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "created by marl-ray experiment create",
    url: GatewayUrl = LOCAL_GATEWAY,
    as_json: Json = False,
) -> None:
    """Start an experiment on a running gateway.

    It needs an admin key in MARL_RAY_API_KEY.
    """
    from marl_ray.config import ExperimentConfig, load_config
    from marl_ray.serving.administration.remote_experiments import report_lines
    from marl_ray.serving.client.requests import request_json

    body = load_config(ExperimentConfig, config).model_dump(mode="json") | {"reason": reason}
    report = request_json(url, "/v1/experiments", body)
    show(as_json, report, report_lines(report))


@experiment_app.command("ls")
def experiment_list(url: GatewayUrl = LOCAL_GATEWAY, as_json: Json = False) -> None:
    """List the experiments of the gateway."""
    from marl_ray.serving.client.requests import request_json

    rows = request_json(url, "/v1/experiments")["experiments"]
    shares = [", ".join(f"{arm} {share:.1%}" for arm, share in row["arms"].items()) for row in rows]
    lines = [
        f"{row['name']}: {row['status']}, epoch {row['epoch']}, {row_shares}"
        for row, row_shares in zip(rows, shares, strict=True)
    ]
    show(as_json, rows, lines)


@experiment_app.command("status")
def experiment_status(name: ExperimentName, url: GatewayUrl = LOCAL_GATEWAY, as_json: Json = False) -> None:
    """Show an experiment's state, traffic, outcomes and decisions."""
    from marl_ray.serving.administration.remote_experiments import report_lines
    from marl_ray.serving.client.requests import experiment_path, request_json

    report = request_json(url, experiment_path(name))
    show(as_json, report, report_lines(report))


@experiment_app.command("watch")
def experiment_watch(name: ExperimentName, url: GatewayUrl = LOCAL_GATEWAY, as_json: Json = False) -> None:
    """Show the status live, until the experiment is over.

    With --json it prints the last status.
    """
    from rich.console import Console
    from rich.live import Live

    from marl_ray.serving.administration.remote_experiments import report_lines, watch

    with Live(auto_refresh=False, console=Console(stderr=as_json)) as live:
        for report in watch(url, name):
            live.update("\n".join(report_lines(report)), refresh=True)
    if as_json:
        show(as_json, report, ())


@experiment_app.command("audit")
def experiment_audit(name: ExperimentName, url: GatewayUrl = LOCAL_GATEWAY, as_json: Json = False) -> None:
    """Show every change of an experiment: when, by whom, why."""
    from datetime import UTC, datetime

    from marl_ray.serving.client.requests import experiment_path, request_json

    def entry_line(entry: JsonObject) -> str:
        at = datetime.fromtimestamp(entry["at"], UTC).isoformat(timespec="seconds")
        arm = f" {entry['arm']}" if entry["arm"] else ""
        return f"{at}  epoch {entry['epoch']:<4} {entry['action']}{arm}  by {entry['actor']}: {entry['reason']}"

    entries = request_json(url, experiment_path(name, "audit"))["audit"]
    show(as_json, entries, map(entry_line, entries))


@experiment_app.command("off-policy")
def experiment_off_policy(
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="models:/name/version, models:/name@alias, or a folder.")
    ],
    data: Annotated[str, typer.Option(help="File or folder that `marl-ray export` wrote.")],
    floor: Annotated[float, typer.Option(help="Number that the lower bound of its mean outcome must exceed.")],
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI", help="MLflow server or file that knows models:/; runs/mlflow.db by default."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate a bundle's outcome from logged units of others.

    The exit status is 1 if the bundle should not be exposed.
    """
    from marl_ray.evaluation.off_policy.acts import estimate_outcome
    from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
    from marl_ray.policies.bundles.loading import load_bundle

    loaded = load_bundle(bundle, tracking_uri)
    if isinstance(loaded, ActorCriticBundle):
        estimate = estimate_outcome(loaded, data, floor=floor)
    else:
        from marl_ray.evaluation.off_policy.texts import estimate_text_outcome  # transformers takes seconds to import

        estimate = estimate_text_outcome(loaded, data, floor=floor)
    lines = [
        f"{estimate.units} units, logged mean {estimate.logged:.4g}, {estimate.greedy_units} greedy units left out",
        *(
            f"  {name:<14} {value.estimate:.4g}, at least {value.low:.4g} ({value.effective:.0f} effective units)"
            for name, value in (("SNIPS", estimate.value), ("doubly robust", estimate.doubly_robust))
        ),
        f"{'may' if estimate.gate.passed else 'must not'} be exposed: {estimate.gate.reason}",
    ]
    show(as_json, estimate, lines)
    raise typer.Exit(0 if estimate.gate.passed else 1)


def _add_change_command(action: str, text: str) -> None:
    """Add the command that asks the gateway for this action; `text` is its line in the help."""

    @experiment_app.command(action.replace("_", "-"), help=f"{text}\n\n{KEY_NEEDED}")
    def command(
        name: ExperimentName,
        reason: Annotated[str, typer.Option(help="Why, for the audit log.")],
        arm: Annotated[str | None, typer.Option(help="The treatment, if there are several.")] = None,
        url: GatewayUrl = LOCAL_GATEWAY,
        as_json: Json = False,
    ) -> None:
        from marl_ray.serving.client.requests import experiment_path, request_json

        body = {"reason": reason} | ({"arm": arm} if arm else {})
        report = request_json(url, experiment_path(name, action), body)
        show(as_json, report, [f"{name}: {report['status']}, epoch {report['epoch']}"])


for _action, _text in (
    ("start", "Start a draft."),
    ("next_stage", "Go to the next stage."),
    ("pause", "Send all new units to the control."),
    ("resume", "Continue after a pause."),
    ("promote", "Give a treatment all traffic."),
    ("rollback", "Take a treatment's traffic away, for good."),
    ("stop", "End the experiment with the control."),
):
    _add_change_command(_action, _text)
