"""The reference of config keys, docs/config.md, as a Markdown page made from the JSON schemas of the configs."""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from marl_ray.config.base import Config
from marl_ray.config.cluster import ClusterConfig
from marl_ray.config.run.config import RunConfig
from marl_ray.config.serving.experiment import ExperimentConfig
from marl_ray.config.serving.gateway import GatewayConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.json_types import JsonMapping

CONFIGS: dict[str, type[Config]] = {
    "run": RunConfig,
    "sweep": SweepConfig,
    "experiment": ExperimentConfig,
    "gateway": GatewayConfig,
    "cluster": ClusterConfig,
}
"""Kind, as the command line names it -> config."""
PURPOSES = {
    "run": "`marl-ray train CONFIG`, `marl-ray submit train CONFIG`; described in [training](training/README.md).",
    "sweep": "`marl-ray sweep CONFIG`; described in [sweeps.md](sweeps.md).",
    "experiment": "`POST /v1/experiments`, `experiments` of a gateway; described in [experiments](experiments/README.md).",
    "gateway": "`args` of the application in a Serve config; described in [serving](serving/README.md).",
    "cluster": "`marl-ray cluster render CONFIG`, `--kuberay CONFIG`; described in [Kubernetes](clusters/kubernetes.md).",
}
INTRODUCTION = """\
# Config keys

`marl-ray config reference` writes this page from the configs themselves; a test compares the two. A dotted key is a path
in the YAML file, and an override on the command line (`train.total_steps=5000`). `NAME` stands for a name of your choice,
`[]` for each entry of a list. A key without a default is required. Unknown keys are refused, and so are keys that the
chosen algorithm or family of policies does not read. `marl-ray train CONFIG --dry-run` prints a run's config with all
defaults; `marl-ray config schema KIND` prints the JSON schema that editors complete and check YAML with.
"""
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_WORDS = {"string": "text", "object": "mapping", "array": "list"}
_SECTIONS = {model.__name__: kind for kind, model in CONFIGS.items()}
"""Name of a config's class -> its kind, which has a section of its own."""

ConfigSchema = JsonMapping
"""A JSON schema, or a part of one."""


class KeyRow(NamedTuple):
    """A row of a table of keys."""

    key: str
    type: str
    default: str
    description: str


def reference_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([INTRODUCTION, *(_section(kind) for kind in CONFIGS)])


def key_rows(kind: str) -> list[KeyRow]:
    """Return every key of a config of this kind, those of its parts after them."""
    schema = CONFIGS[kind].model_json_schema()
    return list(_rows(schema, schema["$defs"], ""))


def _section(kind: str) -> str:
    purpose, rows = " ".join((CONFIGS[kind].__doc__ or "").split()), key_rows(kind)
    lines = [f"## {kind.capitalize()}", "", f"{purpose} This config has {len(rows)} keys. Read by {PURPOSES[kind]}", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.key}`", row.type, row.default, row.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _rows(group: ConfigSchema, parts: Mapping[str, ConfigSchema], prefix: str) -> Iterator[KeyRow]:
    """Yield the rows of a group's keys. A group among them is followed by its own keys."""
    for name, field in group["properties"].items():
        key = f"{prefix}{name}"
        inner = [] if "const" in field else list(_group_schemas(field, parts, key))
        description = field.get("description") or next((part.get("description", "") for _, part in inner), "")
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        if inner and default != "`null`" and "anyOf" not in field:
            default = ""  # its keys have their own
        if name in group.get("required", ()):
            default = "required"
        yield KeyRow(key, _type_text(field), default, " ".join(description.split()))
        for path, part in inner:
            kind = part["properties"].get("kind", {}).get("const")
            for row in _rows(part, parts, f"{path}."):
                if kind is None:
                    yield row
                elif row.key != f"{path}.kind":
                    yield row._replace(description=f"`kind: {kind}`. {row.description}")


def _group_schemas(
    field: ConfigSchema, parts: Mapping[str, ConfigSchema], path: str
) -> Iterator[tuple[str, ConfigSchema]]:
    """Yield (path, schema) of the groups of keys that a field holds.

    Configs with a section of their own are left out.
    """
    if "$ref" in field:
        name = field["$ref"].removeprefix("#/$defs/")
        if name not in _SECTIONS:
            yield path, parts[name]
    for other in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from _group_schemas(other, parts, path)
    if isinstance(field.get("items"), Mapping):
        yield from _group_schemas(field["items"], parts, f"{path}[]")
    for values in _value_schemas(field):
        yield from _group_schemas(values, parts, f"{path}.NAME")


def _value_schemas(field: ConfigSchema) -> list[ConfigSchema]:
    """Return the schema of a mapping's values, if it has one."""
    schemas = [*field.get("patternProperties", {}).values(), field.get("additionalProperties")]
    return [values for values in schemas if isinstance(values, Mapping)]


def _type_text(field: ConfigSchema) -> str:
    """Return the type of a field, in words."""
    if "$ref" in field:
        kind = _SECTIONS.get(field["$ref"].removeprefix("#/$defs/"))
        return "group" if kind is None else f"[{kind}](#{kind})"
    if "anyOf" in field or "oneOf" in field:
        return " or ".join(dict.fromkeys(map(_type_text, field.get("anyOf") or field["oneOf"])))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum") or [field["const"]])
    if "prefixItems" in field:
        return f"[{', '.join(map(_type_text, field['prefixItems']))}]"
    if isinstance(field.get("items"), Mapping) and field["items"]:
        return f"list of {_type_text(field['items'])}"
    if values := _value_schemas(field):
        return f"mapping of names to {_type_text(values[0])}"
    kind = str(field.get("type", "any value"))
    bounds = [f"{sign} {field[bound]:g}" for bound, sign in _BOUNDS.items() if bound in field]
    return " ".join([_WORDS.get(kind, kind), " and ".join(bounds)]).strip()
