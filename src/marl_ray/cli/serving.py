"""The commands of serving: gateways, experiments, deploying bundles, exporting data that was served."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from marl_ray.cli.options import LOCAL_DASHBOARD, Address
from marl_ray.errors import MarlRayError

experiment_app = typer.Typer(help="Look at and change the experiments of a gateway.", no_args_is_help=True)
LOCAL_GATEWAY = "http://127.0.0.1:8000"
KEY_NEEDED = "Needs an admin key in MARL_RAY_API_KEY."
GatewayUrl = Annotated[str, typer.Option("--url", envvar="MARL_RAY_GATEWAY", help="The gateway's address.")]
ExperimentName = Annotated[str, typer.Argument(metavar="NAME", help="The experiment.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(experiment_app, name="experiment")
    for command in (serve, lint, deploy, export):
        app.command()(command)


def serve(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Serve config file.")],
    address: Address = LOCAL_DASHBOARD,
    timeout_s: Annotated[float, typer.Option(help="How long the deployment may take.")] = 120.0,
    local: Annotated[
        bool, typer.Option("--local", help="On a Ray of its own on this machine, until Ctrl-C, with a new admin key.")
    ] = False,
) -> None:
    """Deploy a gateway: check the Serve config strictly, deploy it, wait until it answers."""
    if local:
        from marl_ray.cli.local_gateway import serve_locally

        serve_locally(config, timeout_s)
        return
    from marl_ray.serving.client.deploy import deploy

    for name, url in deploy(config, address, timeout_s).urls.items():
        print(f"{name} runs at {url}")


def lint(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Serve configs or KubeRay manifests.")],
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 for advice, too.")] = False,
) -> None:
    """Check Serve configs and KubeRay manifests: a line for each finding, exit 2 unless all of them are advice."""
    from marl_ray.cluster.lint.documents import is_manifest, read_documents, serve_config
    from marl_ray.cluster.lint.linter import ADVICE, lint_manifest, replica_pods
    from marl_ray.serving.client.lint import lint_serve_config

    findings: list[str] = []
    for path in files:
        for document in read_documents(path):
            if not is_manifest(document):
                findings += lint_serve_config(document, str(path))
                continue
            problems = lint_manifest(document, str(path))
            inner = serve_config(document)
            findings += problems
            if inner is not None:
                pods = 1 if problems else replica_pods(document)
                findings += lint_serve_config(inner, str(path), where="spec.serveConfigV2.", pods=pods)
    for finding in findings:
        print(finding)
    if (strict and findings) or any(f": {ADVICE}" not in finding for finding in findings):
        raise typer.Exit(2)
    print(f"{len(files)} files, {f'{len(findings)} pieces of advice' if findings else 'no findings'}")


def deploy(
    bundle: Annotated[
        str | None,
        typer.Argument(
            metavar="BUNDLE", help="models:/name/version, models:/name@alias, or a folder that the gateway sees."
        ),
    ] = None,
    from_sweep: Annotated[
        str | None,
        typer.Option(metavar="SWEEP", help="Instead of BUNDLE, a sweep's winner: its folder, or its name in runs."),
    ] = None,
    strategy: Annotated[
        Literal["gradual", "ab", "shadow", "replace"], typer.Option(help="How it meets the traffic.")
    ] = "gradual",
    endpoint: Annotated[
        str | None, typer.Option(help="The name that clients act on; may be left out where there is one.")
    ] = None,
    margin: Annotated[
        str, typer.Option(help="Loss of outcome that is accepted: a number, or a part of the control's mean as 2%.")
    ] = "0.02",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the experiment, such as min_outcomes=100."),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why, for the audit log.")] = None,
    url: GatewayUrl = LOCAL_GATEWAY,
) -> None:
    """Roll a bundle out against the one in production. Needs an admin key in MARL_RAY_API_KEY."""
    from marl_ray.serving.client.admin import ask, deploy_bundle, lines

    if (bundle is None) == (from_sweep is None):
        raise MarlRayError("deploy: expected either BUNDLE or --from-sweep SWEEP")
    if from_sweep is not None:
        from marl_ray.tuning.records import winner_of

        bundle, description = winner_of(from_sweep)
        reason = reason or description
        endpoints = ask(url, "/v1/endpoints")["endpoints"]
        if endpoint not in endpoints and (endpoint or not endpoints):
            where = f"endpoint {endpoint!r}" if endpoint else f"gateway {url}"
            raise MarlRayError(
                f"deploy --from-sweep: {where} has no model in production to compare with; deploy one first: "
                f"marl-ray deploy {bundle} --endpoint {endpoint or 'NAME'}"
            )
    assert bundle is not None
    reason = reason or "deployed by marl-ray deploy"
    options = _settings([f"margin={margin}", *(settings or ())])
    print("\n".join(lines(deploy_bundle(url, bundle, strategy, endpoint, options, reason))))


def export(
    name: ExperimentName,
    out: Annotated[str, typer.Option(help="Folder, or s3://bucket/prefix, for NAME.parquet.")],
    decisions: Annotated[str, typer.Option(help="The gateway's decision_log.")],
    database: Annotated[
        str, typer.Option(envvar="MARL_RAY_DATABASE", help="SQLAlchemy URL of the experiment store.")
    ] = "sqlite:///runs/experiments.db",
) -> None:
    """Write served acts and texts, with their outcomes, as trajectories that `marl-ray train warm_start.data=...`
    reads."""
    from marl_ray.experiments.store.experiment_store import ExperimentStore
    from marl_ray.serving.logs.export import export as write

    store = ExperimentStore(database)
    try:
        done = write(store, name, decisions, out)
    finally:
        store.close()
    print(f"{done.path}: {done.units} units, {done.sequences} sequences, {done.decisions} decisions")
    print(f"  left out: {done.censored} units without an outcome, {done.mixed} with acts of another bundle")


def _settings(given: Any) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise MarlRayError(f"--set {setting!r}: expected KEY=VALUE")
        values[key] = yaml.safe_load(value)
    return values


@experiment_app.command("create")
def experiment_create(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of one experiment.")],
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "created by marl-ray experiment create",
    url: GatewayUrl = LOCAL_GATEWAY,
) -> None:
    """Start an experiment on a running gateway. Needs an admin key in MARL_RAY_API_KEY."""
    from marl_ray.config import ExperimentConfig, load_config
    from marl_ray.serving.client.admin import ask, lines

    body = load_config(ExperimentConfig, config).model_dump(mode="json") | {"reason": reason}
    print("\n".join(lines(ask(url, "/v1/experiments", body))))


@experiment_app.command("list")
def experiment_list(url: GatewayUrl = LOCAL_GATEWAY) -> None:
    """List the experiments of the gateway."""
    from marl_ray.serving.client.admin import ask

    for row in ask(url, "/v1/experiments")["experiments"]:
        arms = ", ".join(f"{arm} {share:.1%}" for arm, share in row["arms"].items())
        print(f"{row['name']}: {row['status']}, epoch {row['epoch']}, {arms}")


@experiment_app.command("status")
def experiment_status(name: ExperimentName, url: GatewayUrl = LOCAL_GATEWAY) -> None:
    """Show an experiment's state, traffic, outcomes and decisions."""
    from marl_ray.serving.client.admin import ask, lines

    print("\n".join(lines(ask(url, f"/v1/experiments/{name}"))))


@experiment_app.command("watch")
def experiment_watch(name: ExperimentName, url: GatewayUrl = LOCAL_GATEWAY) -> None:
    """Show the status live, until the experiment is over."""
    from rich.live import Live

    from marl_ray.serving.client.admin import watch

    with Live(auto_refresh=False) as live:
        for text in watch(url, name):
            live.update("\n".join(text), refresh=True)


@experiment_app.command("audit")
def experiment_audit(name: ExperimentName, url: GatewayUrl = LOCAL_GATEWAY) -> None:
    """Show every change of an experiment: when, by whom, why."""
    from datetime import UTC, datetime

    from marl_ray.serving.client.admin import ask

    for entry in ask(url, f"/v1/experiments/{name}/audit")["audit"]:
        at = datetime.fromtimestamp(entry["at"], UTC).isoformat(timespec="seconds")
        arm = f" {entry['arm']}" if entry["arm"] else ""
        print(f"{at}  epoch {entry['epoch']:<4} {entry['action']}{arm}  by {entry['actor']}: {entry['reason']}")


@experiment_app.command("off-policy")
def experiment_off_policy(
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="models:/name/version, models:/name@alias, or a folder.")
    ],
    data: Annotated[str, typer.Option(help="What `marl-ray export` wrote.")],
    floor: Annotated[float, typer.Option(help="What the lower bound of its mean outcome must exceed.")],
    tracking_uri: Annotated[
        str | None, typer.Option(envvar="MLFLOW_TRACKING_URI", help="Where models:/ are; runs/mlflow.db by default.")
    ] = None,
) -> None:
    """Estimate the outcome that a bundle would have, from logged units of others; status 1 if it should not be
    exposed."""
    from marl_ray.evaluation.off_policy.acts import judge
    from marl_ray.policies.bundles.actor_critic import Bundle, load_bundle

    loaded = load_bundle(bundle, tracking_uri)
    if isinstance(loaded, Bundle):
        estimate = judge(loaded, data, floor=floor)
    else:
        from marl_ray.evaluation.off_policy.texts import judge_texts  # transformers takes seconds to import

        estimate = judge_texts(loaded, data, floor=floor)
    print(f"{estimate.units} units, logged mean {estimate.logged:.4g}, {estimate.greedy_units} greedy units left out")
    for name, value in (("SNIPS", estimate.value), ("doubly robust", estimate.doubly_robust)):
        print(f"  {name:<14} {value.estimate:.4g}, at least {value.low:.4g} ({value.effective:.0f} effective units)")
    print(f"{'may' if estimate.gate.passed else 'must not'} be exposed: {estimate.gate.reason}")
    raise typer.Exit(0 if estimate.gate.passed else 1)


def _change_command(action: str, text: str) -> None:
    @experiment_app.command(action.replace("_", "-"), help=f"{text} {KEY_NEEDED}")
    def command(
        name: ExperimentName,
        reason: Annotated[str, typer.Option(help="Why, for the audit log.")],
        arm: Annotated[str | None, typer.Option(help="The treatment, if there are several.")] = None,
        url: GatewayUrl = LOCAL_GATEWAY,
    ) -> None:
        from marl_ray.serving.client.admin import ask

        body = {"reason": reason} | ({"arm": arm} if arm else {})
        now = ask(url, f"/v1/experiments/{name}/{action}", body)
        print(f"{name}: {now['status']}, epoch {now['epoch']}")


for _action, _text in (
    ("start", "Start a draft."),
    ("next_stage", "Go to the next stage."),
    ("pause", "Send all new units to the control."),
    ("resume", "Go on after a pause."),
    ("promote", "Give a treatment all traffic."),
    ("rollback", "Take a treatment's traffic away, for good."),
    ("stop", "End the experiment with the control."),
):
    _change_command(_action, _text)
