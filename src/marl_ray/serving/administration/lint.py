"""The linter of Serve configs.

It names every unknown key at every depth, every wrong value, and what would fail in production.
"""

import copy
import difflib
import json
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from marl_ray.config import GatewayConfig, read_yaml
from marl_ray.config.load import other_kind_hint
from marl_ray.config.mistakes.wording import choice_hint, message_of
from marl_ray.config.serving.arms import max_replicas
from marl_ray.config.serving.plain_secrets import has_password, secret_variables
from marl_ray.errors import MarlRayError, one_line, type_name
from marl_ray.json_types import JsonMapping, JsonObject

IMPORT_PATHS = ("marl_ray.serving.app:build", "serve.app:build")
"""Applications of ours, whose `args` are a GatewayConfig."""
INGRESS = "Gateway"
"""Name of the deployment that takes the requests."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only the machine itself reaches."""
PORTS = range(1, 1 << 16)
"""The ports of TCP. Serve takes any number, and its proxies never begin to listen."""
ConfigFault = tuple[str, str]
"""Path of a key, and what was expected there."""

_IMPORTING_KEYS = ("policy", "request_router_class")
"""Keys of Serve's models that import what they name as soon as they are validated."""


def read_serve_config(config: str | Path | JsonMapping) -> JsonObject:
    """Return a Serve config from a YAML file or a mapping, checked strictly.

    Serve ignores keys that it does not know, so a misspelt one would pass in silence; here it is refused. Raises
    MarlRayError naming file and key.
    """
    source = "serve config" if isinstance(config, Mapping) else str(config)
    data: Any = dict(config) if isinstance(config, Mapping) else read_yaml(config)
    faults = lint_serve_config(data, source)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise MarlRayError(faults[0] + more)
    return dict(data)


def lint_serve_config(data: Any, source: str, *, where: str = "", pods: int | None = None) -> list[str]:
    """Return one line `SOURCE: key.path: what was expected` for each fault of a Serve config.

    `where` precedes every path (such as `spec.serveConfigV2.`). `pods` is the number of pods that may run replicas; it
    is given for a config inside a Kubernetes manifest.
    """
    if not isinstance(data, Mapping):
        faults: list[ConfigFault] = [("", f"expected a mapping of keys at the top, got {type_name(data)}")]
    elif hint := other_kind_hint(("applications",), data, source):
        faults = [("", hint)]
    else:
        try:
            plain = json.loads(json.dumps(data))
        except (TypeError, ValueError, RecursionError) as error:
            faults = [("", f"expected plain data: {one_line(error)}")]
        else:
            faults = list(_find_faults(plain, pods))
    return [": ".join(filter(None, (source, (where + path).rstrip("."), message))) for path, message in faults]


def _find_faults(data: JsonObject, pods: int | None) -> Iterator[ConfigFault]:
    from ray.serve.schema import ServeDeploySchema

    yield from _unknown_keys_at_every_depth(data, ServeDeploySchema, "")
    yield from _wrong_value_faults(_without_unknown_keys(data, ServeDeploySchema), ServeDeploySchema, "")
    options = data.get("http_options")
    # Without a host Serve's REST API, unlike its Python API, binds to all interfaces.
    host = options.get("host", "0.0.0.0") if isinstance(options, dict) else "0.0.0.0"  # noqa: S104
    port = options.get("port", 8000) if isinstance(options, dict) else 8000
    if isinstance(port, int) and port not in PORTS:
        yield "http_options.port", f"expected a port from {PORTS[0]} to {PORTS[-1]}, got {port}"
    if pods is not None and host in LOOPBACK:
        yield "http_options.host", f"expected 0.0.0.0, got {host!r}, which nothing outside the pod reaches"
    proxies = data.get("proxy_location", "EveryNode")
    if pods is not None and proxies != "EveryNode":
        message = f"expected EveryNode, got {proxies!r}: KubeRay calls a worker ready when the proxy on it answers"
        yield "proxy_location", message
    for k, application in _mappings_of_list(data, "applications"):
        if application.get("import_path") in IMPORT_PATHS:
            yield from _gateway_faults(application, f"applications.{k}.", host, pods)


def _gateway_faults(application: JsonObject, where: str, host: Any, pods: int | None) -> Iterator[ConfigFault]:
    args = application.get("args", {})
    if not isinstance(args, dict):
        return  # Serve's own schema has reported it
    yield from _unknown_keys_at_every_depth(args, GatewayConfig, f"{where}args.")
    known_args = _without_unknown_keys(args, GatewayConfig)
    value_faults = list(_wrong_value_faults(known_args, GatewayConfig, f"{where}args."))
    yield from value_faults
    config = None if value_faults else GatewayConfig.model_validate(known_args)
    is_autoscaled = False
    for j, deployment in _mappings_of_list(application, "deployments"):
        path = f"{where}deployments.{j}."
        if "num_replicas" in deployment:
            yield f"{path}num_replicas", "expected the replicas in `args`, which this key overrides"
        if deployment.get("user_config") is not None:
            message = "expected none: weights, stages and all state of a ramp belong to the database"
            yield f"{path}user_config", f"{message}, for Serve sends this again whenever the config is submitted"
        if deployment.get("name") != INGRESS:
            continue
        ongoing = deployment.get("max_ongoing_requests")
        if config and isinstance(ongoing, int) and ongoing < config.max_batch:
            message = f"expected at least max_batch ({config.max_batch}), got {ongoing}: batches would never fill"
            yield f"{path}max_ongoing_requests", message
        is_autoscaled = deployment.get("autoscaling_config") is not None
        if config and is_autoscaled and max_replicas(config.replicas) < 2:
            message = "expected `replicas` in `args` of 2 at least, by which the replicas know that there are others"
            yield f"{path}autoscaling_config", message
    if config is None:
        return
    if host not in LOOPBACK and config.api_keys is None:
        message = f"expected 127.0.0.1 or {where}args.api_keys: at {host!r} anybody could act and post outcomes"
        yield "http_options.host", message
    if (
        config.database.startswith("sqlite")
        and pods is not None
        and (pods > 1 or max_replicas(config.replicas) > 1 or is_autoscaled)
    ):
        message = "expected PostgreSQL, such as postgresql:// with PGHOST and the like in the environment"
        yield f"{where}args.database", f"{message}: every pod would have an SQLite file of its own"
    urls = {"database": config.database, "tracking_uri": config.tracking_uri}
    urls |= {"cache.url": config.cache.url} if config.cache else {}
    urls |= {"webhook.url": config.webhook.url} if config.webhook else {}
    for key, url in urls.items():
        if url and has_password(url):
            yield f"{where}args.{key}", "expected no password here; the environment has it (such as PGPASSWORD)"


def _mappings_of_models(
    value: Any, annotation: Any, where: str
) -> Iterator[tuple[type[BaseModel], JsonObject, str, bool]]:
    """Yield all mappings of plain data that a model describes, at every depth.

    Each comes as (model, mapping, path with a dot at its end, whether the type accepts any other mapping too).
    """
    alternatives = list(_alternatives(annotation))
    models = [a for a in alternatives if isinstance(a, type) and issubclass(a, BaseModel)]
    if isinstance(value, dict) and models:
        model = models[0]
        yield model, value, where, any(dict in (a, get_origin(a)) for a in alternatives)
        for key, part in value.items():
            if key in model.model_fields:
                yield from _mappings_of_models(part, model.model_fields[key].annotation, f"{where}{key}.")
    elif isinstance(value, dict):
        for values in (get_args(a)[1] for a in alternatives if get_origin(a) is dict and get_args(a)):
            for key, part in value.items():
                yield from _mappings_of_models(part, values, f"{where}{key}.")
    elif isinstance(value, list):
        for items in (get_args(a)[0] for a in alternatives if get_origin(a) in (list, tuple) and get_args(a)):
            for k, item in enumerate(value):
                yield from _mappings_of_models(item, items, f"{where}{k}.")


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation


def _unknown_keys_at_every_depth(data: JsonObject, model: type[BaseModel], where: str) -> Iterator[ConfigFault]:
    for part_model, part, path, _ in _mappings_of_models(data, model, where):
        yield from _unknown_key_faults(part, part_model.model_fields, path)
        if "runtime_env" in part_model.model_fields and isinstance(part.get("runtime_env"), dict):
            yield from _runtime_env_faults(part["runtime_env"], f"{path}runtime_env.")


def _runtime_env_faults(value: JsonObject, where: str) -> Iterator[ConfigFault]:
    from ray.runtime_env import RuntimeEnv, RuntimeEnvConfig

    yield from _unknown_key_faults(value, RuntimeEnv.known_fields, where)
    if isinstance(value.get("config"), dict):
        yield from _unknown_key_faults(value["config"], RuntimeEnvConfig.known_fields, f"{where}config.")
    for name in secret_variables(value.get("env_vars")):
        message = "expected no secret here, where the dashboard shows it; set it on the cluster's machines"
        yield f"{where}env_vars.{name}", f"{message}, and name it ${{NAME}}"


def _unknown_key_faults(part: JsonObject, keys: Collection[str], where: str) -> Iterator[ConfigFault]:
    for key in (key for key in part if key not in keys):
        close = difflib.get_close_matches(key, keys, 1)
        yield where + key, "unknown key" + (f", did you mean {close[0]!r}?" if close else "")


def _without_unknown_keys(data: JsonObject, model: type[BaseModel]) -> JsonObject:
    known = copy.deepcopy(data)
    for part_model, part, _, _ in _mappings_of_models(known, model, ""):
        for key in part.keys() - part_model.model_fields.keys():
            del part[key]
    return known


def _wrong_value_faults(data: JsonObject, model: type[BaseModel], where: str) -> Iterator[ConfigFault]:
    """Yield one fault for each key whose value pydantic refuses. All keys are known ones."""
    yield from _validation_faults(data, model, where)
    # Serve types some parts as "any mapping, or this model", and checks their values only when it deploys them.
    for part_model, part, path, any_mapping in _mappings_of_models(data, model, where):
        if any_mapping:
            checkable = {key: value for key, value in part.items() if key not in _IMPORTING_KEYS}
            yield from _validation_faults(checkable, part_model, path)


def _validation_faults(data: JsonObject, model: type[BaseModel], where: str) -> Iterator[ConfigFault]:
    reported_paths = set()
    try:
        model.model_validate(copy.deepcopy(data))  # Serve's validators change their input
    except ValidationError as error:
        for part in error.errors():
            path = ".".join(_existing_path(data, part["loc"], missing=part["type"] == "missing"))
            if path not in reported_paths:
                yield (where + path).rstrip("."), " ".join((message_of(part) + choice_hint(part)).split())
            reported_paths.add(path)
    except (ImportError, NotImplementedError, AttributeError, TypeError) as error:  # validators that do more than check
        yield where.rstrip("."), one_line(error)


def _existing_path(data: Any, location: tuple[int | str, ...], missing: bool) -> Iterator[str]:
    """Yield the part of pydantic's location that exists in the data.

    The rest of the location names members of a union.
    """
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            if missing:
                yield str(part)
            return
        yield str(part)


def _mappings_of_list(data: JsonObject, key: str) -> Iterator[tuple[int, JsonObject]]:
    part = data.get(key)
    return ((k, item) for k, item in enumerate(part if isinstance(part, list) else []) if isinstance(item, dict))
