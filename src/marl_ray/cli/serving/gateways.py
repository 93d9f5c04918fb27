"""`marl-ray serve`, `lint`, `deploy` and `export`: the commands of gateways."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from marl_ray.cli.documents.output import Json, only_result, show
from marl_ray.cli.options import (
    LOCAL_DASHBOARD,
    LOCAL_DATABASE,
    LOCAL_GATEWAY,
    Address,
    DatabaseUrl,
    ExperimentName,
    GatewayUrl,
)
from marl_ray.errors import MarlRayError


def serve(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Serve config file.")],
    address: Address = LOCAL_DASHBOARD,
    timeout_s: Annotated[float, typer.Option(help="Maximum seconds that the deployment may take.")] = 300.0,
    local: Annotated[
        bool,
        typer.Option("--local", help="Serve on a Ray of its own on this machine, until Ctrl-C, with a new admin key."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Deploy a gateway.

    It checks the Serve config strictly, deploys it, and waits until it answers.
    """
    if local:
        if as_json:
            raise MarlRayError("serve: expected --local or --json, not both; --local serves until Ctrl-C")
        from marl_ray.cli.serving.local_gateway import serve_locally

        serve_locally(config, timeout_s)
        return
    from marl_ray.serving.administration.deploy import deploy

    with only_result(as_json):
        urls = deploy(config, address, timeout_s).urls
    show(as_json, {"urls": urls}, [f"{name} runs at {url}" for name, url in urls.items()])


def lint(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Serve configs or KubeRay manifests.")],
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 for advice too.")] = False,
    as_json: Json = False,
) -> None:
    """Check Serve configs and KubeRay manifests.

    It prints a line for each finding, and exits with status 2 unless all of them are advice.
    """
    from marl_ray.cluster.lint.documents import embedded_serve_config, is_manifest, read_documents
    from marl_ray.cluster.lint.linter import ADVICE_PREFIX, lint_manifest, replica_pods
    from marl_ray.serving.administration.lint import lint_serve_config

    findings: list[str] = []
    for path in files:
        for document in read_documents(path):
            if not is_manifest(document):
                findings += lint_serve_config(document, str(path))
                continue
            faults = lint_manifest(document, str(path))
            embedded_config = embedded_serve_config(document)
            findings += faults
            if embedded_config is not None:
                pods = 1 if faults else replica_pods(document)
                findings += lint_serve_config(embedded_config, str(path), where="spec.serveConfigV2.", pods=pods)
    advice = [f": {ADVICE_PREFIX}" in finding for finding in findings]
    passed = all(advice) and not (strict and findings)
    rows = [{"text": text, "advice": is_advice} for text, is_advice in zip(findings, advice, strict=True)]
    pieces = "1 piece" if len(findings) == 1 else f"{len(findings)} pieces"
    advised = f"{pieces} of advice" if findings else "no findings"
    count = f"{len(files)} {'file' if len(files) == 1 else 'files'}, {advised}"
    document = {"files": len(files), "passed": passed, "findings": rows}
    show(as_json, document, [*findings, *([count] if passed else [])])
    if not passed:
        raise typer.Exit(2)


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
        Literal["gradual", "ab", "shadow", "replace"],
        typer.Option(help="Strategy of the experiment: the way in which the bundle gets traffic."),
    ] = "gradual",
    endpoint: Annotated[
        str | None, typer.Option(help="The name that clients act on; may be left out where there is one.")
    ] = None,
    margin: Annotated[
        str,
        typer.Option(help="Loss of outcome that is accepted: a number, or a share of the control's mean such as 2%."),
    ] = "0.02",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the experiment, such as min_outcomes=100."),
    ] = None,
    allow_rolled_back: Annotated[
        bool,
        typer.Option(
            "--allow-rolled-back", help="Accept a bundle that another experiment rolled back; the audit log keeps this."
        ),
    ] = False,
    reason: Annotated[str | None, typer.Option(help="Why, for the audit log.")] = None,
    url: GatewayUrl = LOCAL_GATEWAY,
    as_json: Json = False,
) -> None:
    """Roll a bundle out against the one in production.

    It needs an admin key in MARL_RAY_API_KEY.
    """
    from marl_ray.config.load import with_overrides
    from marl_ray.serving.administration.remote_experiments import deploy_bundle, report_lines
    from marl_ray.serving.client.requests import request_json

    if (bundle is None) == (from_sweep is None):
        raise MarlRayError("deploy: expected either BUNDLE or --from-sweep SWEEP")
    options = with_overrides({}, [f"margin={margin}", *(settings or ())])
    if from_sweep is not None:
        from marl_ray.tuning.lookup import winner_of

        bundle, description = winner_of(from_sweep)
        reason = reason or description
        endpoints = request_json(url, "/v1/endpoints")["endpoints"]
        if endpoint not in endpoints and (endpoint or not endpoints):
            where = f"endpoint {endpoint!r}" if endpoint else f"gateway {url}"
            raise MarlRayError(
                f"deploy --from-sweep: {where} has no model in production to compare with; deploy one first: "
                f"marl-ray deploy {bundle} --endpoint {endpoint or 'NAME'}"
            )
    assert bundle is not None
    reason = reason or "deployed by marl-ray deploy"
    report = deploy_bundle(url, bundle, strategy, endpoint, options, reason, allow_rolled_back)
    show(as_json, report, report_lines(report))


def export(
    name: ExperimentName,
    out: Annotated[str, typer.Option(help="Folder, or s3://bucket/prefix, for NAME.parquet.")],
    decisions: Annotated[str, typer.Option(help="The log of acts: decision_log of the gateway's config.")],
    database: DatabaseUrl = LOCAL_DATABASE,
    as_json: Json = False,
) -> None:
    """Export served requests, with their outcomes, as trajectories.

    `marl-ray train warm_start.data=...` reads acts, and `data=decisions://...` texts.
    """
    from marl_ray.experiments.store.facade import open_stores
    from marl_ray.serving.logs.export import export as write

    stores = open_stores(database, is_read_only=True)
    try:
        exported = write(stores.experiments, stores.units, name, decisions, out)
    finally:
        stores.close()
    lines = [
        f"{exported.path}: {exported.units} units, {exported.sequences} sequences, {exported.decisions} decisions",
        f"  left out: {exported.censored} units without an outcome, {exported.mixed} with acts of another bundle",
    ]
    show(as_json, exported, lines)
