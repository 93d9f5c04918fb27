"""`marl-ray algorithms` and `marl-ray config`: names of algorithms, and keys of configs."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.completion import complete_algorithm
from marl_ray.cli.documents.output import Json, show
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from marl_ray.config import AlgorithmSpec

config_app = typer.Typer(help="Print schemas and keys of configs.", no_args_is_help=True)


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One algorithm, with its hyper-parameters and defaults.", autocompletion=complete_algorithm
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms, or show one.

    The list has papers and needs; NAME shows the hyper-parameters of one.
    """
    from marl_ray.config import SPECS, spec_of

    if name is None:
        listed = [{"name": key, **_describe_algorithm(spec)} for key, spec in SPECS.items()]
        show(as_json, listed, _list_lines(listed))
        return
    try:
        spec = spec_of(name)
    except MarlRayError as error:
        raise MarlRayError(f"algorithm: {error}") from error
    document = {"name": name, **_describe_algorithm(spec), "hyper": _hyper_parameters(spec)}
    show(as_json, document, _algorithm_lines(document))


def _describe_algorithm(spec: "AlgorithmSpec") -> dict[str, object]:
    return {
        "title": spec.title,
        "paper": spec.paper,
        "needs": spec.requirements,
        "updates": spec.order,
        "language_models": spec.token_policies and spec.critic != "central",
    }


def _hyper_parameters(spec: "AlgorithmSpec") -> list[dict[str, object]]:
    """Return the hyper-parameters of an algorithm, its own ones first."""
    defaults = spec.hyper.model_validate(spec.defaults).model_dump(mode="json")
    language_defaults = _language_defaults(spec) if spec.token_policies and spec.critic != "central" else {}
    return [
        {
            "key": f"hyper.{key}",
            "default": defaults[key],
            "of_language_models": language_defaults.get(key),
            "own": key in spec.keys,
            "description": " ".join((spec.hyper.model_fields[key].description or "").split()),
        }
        for key in dict.fromkeys([*spec.keys, *spec.common_keys])
    ]


def _list_lines(listed: list[JsonObject]) -> Iterator[str]:
    width = max(len(spec["name"]) for spec in listed)
    for spec in listed:
        needs = f"; needs {', '.join(spec['needs'])}" if spec["needs"] else ""
        trains = "" if spec["language_models"] else "; actor-critics alone"
        yield f"{spec['name']:<{width}}  {spec['title']} ({spec['paper']}){needs}{trains}"
    yield "\nmarl-ray algorithms NAME shows the hyper-parameters of one; set one with algorithm=NAME and hyper.KEY=VALUE."


def _algorithm_lines(document: JsonObject) -> Iterator[str]:
    trains = "any policy" if document["language_models"] else "actor-critics alone"
    yield f"{document['name']}: {document['title']}, {document['paper']}"
    yield f"  needs   {', '.join(document['needs']) or 'nothing'}"
    yield f"  updates {document['updates']}; trains {trains}"
    for title, of_algorithm in (("its own hyper-parameters", True), ("common hyper-parameters", False)):
        yield f"  {title}"
        for row in document["hyper"]:
            if row["own"] == of_algorithm:
                of_models = f" ({row['of_language_models']})" if row["of_language_models"] else ""
                default = f"{row['key']} = {json.dumps(row['default'])}{of_models}"
                yield f"    {default}  {row['description']}".rstrip()


def _language_defaults(spec: "AlgorithmSpec") -> dict[str, str]:
    """Return the defaults of an algorithm's keys for language models, in words.

    Only those are named that differ from the defaults of actor-critics.
    """
    from marl_ray.config import LoraConfig, ModelConfig
    from marl_ray.config.run.family_defaults import family_defaults

    kinds = {"path": {"path": "-"}, "path with lora": {"path": "-", "lora": LoraConfig()}}
    kinds |= {"preset": {"preset": "tiny-1m"}, "preset with lora": {"preset": "tiny-1m", "lora": LoraConfig()}}
    by_source = {
        kind: {**family_defaults(ModelConfig.model_validate(model)), **spec.defaults} for kind, model in kinds.items()
    }
    plain = spec.hyper.model_validate(spec.defaults).model_dump()
    words = {}
    for key in next(iter(by_source.values())):
        values = {kind: json.dumps(values_of_source[key]) for kind, values_of_source in by_source.items()}
        if len(set(values.values())) > 1:
            words[key] = "language models: " + ", ".join(f"{kind} {value}" for kind, value in values.items())
        elif by_source["path"][key] != plain[key]:
            words[key] = f"language models: {values['path']}"
    return words


@config_app.command("schema")
def config_schema(
    kind: Annotated[str, typer.Argument(help="run, sweep, experiment, gateway or cluster.")] = "run",
    as_json: Json = False,
) -> None:
    """Print the JSON schema of a config, with or without --json."""
    from marl_ray.config.reference import CONFIGS

    if kind not in CONFIGS:
        raise MarlRayError(f"kind {kind!r} is unknown{did_you_mean(kind, CONFIGS)}")
    schema = CONFIGS[kind].model_json_schema()
    show(as_json, schema, [json.dumps(schema, indent=2)])


@config_app.command("reference")
def config_reference(as_json: Json = False) -> None:
    """Print the keys of all configs, in Markdown.

    This is the page docs/config.md.
    """
    from marl_ray.config.reference import CONFIGS, key_rows, reference_page

    if as_json:
        show(as_json, {kind: [row._asdict() for row in key_rows(kind)] for kind in CONFIGS}, ())
        return
    print(reference_page(), end="")
