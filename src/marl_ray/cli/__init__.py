"""The command line. Every command imports what it needs when it runs, so `--help` answers at once."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from marl_ray.cli import cluster, evaluation, experiments, serving, sweep, trying
from marl_ray.cli.options import LOCAL_DASHBOARD, Address, Context, KubeRay, Namespace, SubmissionId
from marl_ray.errors import MarlRayError

if TYPE_CHECKING:
    from marl_ray.config import RunConfig, Spec
    from marl_ray.training.driver import RunResult

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""


class _Commands(typer.core.TyperGroup):
    """Typer's own answer to Ctrl-C is status 1."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            print("marl-ray: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    help="Train teams of policies on Ray, measure them, serve the winners.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Inspect configs.", no_args_is_help=True)
submit_app = typer.Typer(help="Run a command as a Ray Job on a cluster.", no_args_is_help=True)
app.add_typer(config_app, name="config")
trying.register(app)
serving.register(app)
cluster.register(app)
experiments.register()
evaluation.register(app)
app.add_typer(submit_app, name="submit")
sweep.register(app, submit_app)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as hyper.lr=3e-4.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")]


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train here: on the cluster of RAY_ADDRESS, or on a Ray of its own that ends with the run.

    The same command continues a run that was interrupted. For a finished run it prints the results and exits with
    status 0.
    """
    from marl_ray.config import RunConfig, load_config

    run = load_config(RunConfig, config, overrides or ())
    if dry_run:
        _print_config(run)
        return
    outcome = _train_here(run)
    if not outcome.trained:
        again = "raise train.total_steps to go on with it, or choose another name"
        print(f"{outcome.name}: is finished, and nothing was trained; {again}")
    reached = "" if outcome.best_return is None else f"best return {outcome.best_return:.3f}, "
    print(f"{outcome.name}: {reached}{outcome.model}")
    for line in outcome.summary:
        print(f"  {line}")
    print(f"  bundle  {outcome.bundle}")
    if outcome.curve:
        print(f"  curve   {outcome.curve}")
    print(f"  MLflow  run {outcome.run_id} in {outcome.tracking_uri}")


@submit_app.command("train")
def submit_train(
    config: ConfigFile,
    overrides: Overrides = None,
    address: Address = LOCAL_DASHBOARD,
    submission_id: SubmissionId = None,
    kuberay: KubeRay = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Train as a Ray Job, or with --kuberay as a RayJob: submit, follow its log, exit with its status."""
    if kuberay is not None:
        parts = (kuberay, submission_id, context, namespace)
        raise typer.Exit(cluster.submit_to_kuberay("train", config, overrides or (), *parts))
    from marl_ray.cluster.jobs import submit

    raise typer.Exit(submit("train", config, overrides or (), address=address, submission_id=submission_id))


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One algorithm, with its knobs and defaults; or `check`.")] = None,
    checked: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The algorithm to check: a built-in or package.module:NAME.")
    ] = None,
) -> None:
    """List the algorithms with their papers, needs and knobs. `check NAME` checks one against its formulas."""
    from marl_ray.config import SPECS, spec_of

    if name == "check":
        _check_algorithm(checked)
        return
    if checked is not None:
        raise MarlRayError(f"algorithms: expected one NAME, or check NAME, got {name} {checked}")
    if name is None:
        width = max(map(len, SPECS))
        for key, spec in SPECS.items():
            needs = f"; needs {', '.join(spec.needs)}" if spec.needs else ""
            print(f"{key:<{width}}  {spec.title} ({spec.paper}){needs}")
        print("\nmarl-ray algorithms NAME shows the knobs of one; set one with algorithm=NAME and hyper.KNOB=VALUE.")
        return
    try:
        spec = spec_of(name)
    except MarlRayError as error:
        raise MarlRayError(f"algorithm: {error}") from error
    defaults = spec.hyper.model_validate(spec.defaults).model_dump(mode="json")
    by_model = _language_defaults(spec) if spec.token_policies and spec.critic != "central" else {}
    print(f"{name}: {spec.title}, {spec.paper}")
    print(f"  needs   {', '.join(spec.needs) or 'nothing'}")
    print(
        f"  updates {spec.order}; trains {'any policy' if spec.token_policies else 'actor-critics, no token policies'}"
    )
    common = [knob for knob in spec.common if knob not in spec.knobs]
    for title, knobs in (("its own knobs", spec.knobs), ("common knobs", common)):
        print(f"  {title}")
        for knob in knobs:
            described = spec.hyper.model_fields[knob].description or ""
            of_models = f" ({by_model[knob]})" if knob in by_model else ""
            print(f"    hyper.{knob} = {json.dumps(defaults[knob])}{of_models}  {' '.join(described.split())}".rstrip())


def _language_defaults(spec: "Spec") -> dict[str, str]:
    """Defaults of an algorithm's keys for language models, in words, where they differ from those of actor-critics."""
    from marl_ray.config import LoraConfig, ModelConfig
    from marl_ray.config.run.family_defaults import family_defaults

    kinds = {"path": {"path": "-"}, "path with lora": {"path": "-", "lora": LoraConfig()}}
    kinds |= {"preset": {"preset": "tiny-1m"}, "preset with lora": {"preset": "tiny-1m", "lora": LoraConfig()}}
    by_source = {
        kind: {**family_defaults(ModelConfig.model_validate(model)), **spec.defaults} for kind, model in kinds.items()
    }
    plain = spec.hyper.model_validate(spec.defaults).model_dump()
    words = {}
    for knob in next(iter(by_source.values())):
        values = {kind: json.dumps(values_of_source[knob]) for kind, values_of_source in by_source.items()}
        if len(set(values.values())) > 1:
            words[knob] = "language models: " + ", ".join(f"{kind} {value}" for kind, value in values.items())
        elif by_source["path"][knob] != plain[knob]:
            words[knob] = f"language models: {values['path']}"
    return words


def _check_algorithm(name: str | None) -> None:
    """Print a line for every property of an algorithm; exit with 1 if one does not hold."""
    from marl_ray.config import spec_of

    if name is None:
        raise MarlRayError("algorithms check: expected the NAME of an algorithm")
    try:
        spec_of(name)
    except MarlRayError as error:
        raise MarlRayError(f"algorithm: {error}") from error
    from marl_ray.conformance.check import check_algorithm

    if not check_algorithm(name, print):
        raise typer.Exit(1)


@config_app.command("schema")
def config_schema(
    kind: Annotated[str, typer.Argument(help="run, sweep, experiment, gateway or cluster.")] = "run",
) -> None:
    """Print the JSON schema of a config."""
    from marl_ray.config.reference import CONFIGS

    if kind not in CONFIGS:
        raise MarlRayError(f"kind {kind!r}: expected one of {', '.join(CONFIGS)}")
    print(json.dumps(CONFIGS[kind].model_json_schema(), indent=2))


@config_app.command("reference")
def config_reference() -> None:
    """Print the table of all keys of all configs, in Markdown: the page docs/config.md."""
    from marl_ray.config.reference import reference_page

    print(reference_page(), end="")


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the gateway serving until Ctrl-C.")] = False,
    folder: Annotated[Path, typer.Option(help="Where runs, plots and databases are written.")] = Path("runs/demo"),
    episodes: Annotated[int, typer.Option(min=1, help="Episodes played through HTTP.")] = 400,
) -> None:
    """The whole product on this machine: train two teams, serve both, A/B them over HTTP."""
    from marl_ray.demo import run_demo

    run_demo(folder, episodes, keep)


def _train_here(run: "RunConfig") -> "RunResult":
    from marl_ray.cluster.local_ray import ray_here
    from marl_ray.ray_seams import cpus_here
    from marl_ray.training.driver import finished, say_kept
    from marl_ray.training.driver import train as train_on_ray
    from marl_ray.training.run_checks import check_run
    from marl_ray.training.run_folder.run_log import RunLog
    from marl_ray.training.surroundings.cluster_capacity import check_cpus
    from marl_ray.training.surroundings.interruption import answering

    before = finished(run)
    if before is not None:
        return before
    if "RAY_ADDRESS" not in os.environ:
        check_cpus(run, cpus_here())
    console = RunLog(run)
    with answering(lambda: say_kept(run, console)):  # checks may take long, and so does a Ray that is half started
        console.phase("checking the run")
        check_run(run)
        console.phase("connecting to Ray" if "RAY_ADDRESS" in os.environ else "starting Ray")
        with ray_here():
            return train_on_ray(run, console)


def _print_config(config: Any) -> None:
    import yaml

    print(yaml.safe_dump(config.resolved(), sort_keys=False), end="")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always raises SystemExit.

    A MarlRayError is one line on stderr and status 2; Ctrl-C is status 130.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python` does, so that an `env.id` may name a module that lies here
    try:
        app(args=list(argv) if argv is not None else None, prog_name="marl-ray")
    except MarlRayError as error:
        print(f"marl-ray: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
