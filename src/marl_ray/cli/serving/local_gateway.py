"""A gateway on this machine alone, for trying it out."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from marl_ray.cluster.local_ray import check_port, local_ray
from marl_ray.config import GatewayConfig
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping
from marl_ray.serving.administration.deploy import deploy
from marl_ray.serving.administration.lint import IMPORT_PATHS, read_serve_config
from marl_ray.serving.client.requests import GATEWAY_VARIABLE, KEY_VARIABLE
from marl_ray.serving.http.keys import new_key

CPUS = 4
"""CPUs that replicas may book in Ray's accounts, however many this machine has."""


def serve_locally(config: Path, timeout_s: float) -> None:
    """Deploy a Serve config on its own Ray, and serve until SIGINT or SIGTERM.

    It prints where it answers. Gateways without `api_keys` get a new key, which is printed; what takes seconds is
    shown on stderr. Raises MarlRayError as `deploy` does, and before Ray starts if the port is taken, or if a bundle,
    a database or a file of keys cannot be read.
    """
    phase = partial(_print_phase, time.monotonic())
    data = read_serve_config(config)
    http = data.get("http_options") or {}
    check_port(http.get("host", "0.0.0.0"), http.get("port", 8000))  # noqa: S104  Serve's own default
    phase(f"checking what {config} names")
    _check_gateways(data, str(config))
    phase("starting Ray")
    with local_ray(num_cpus=max(CPUS, os.cpu_count() or 1)) as ray:
        keys_file = ray.temp_dir / "keys.yaml"
        applications = data["applications"]
        keyless = [
            application
            for application in applications
            if not (application.setdefault("args", {}) or {}).get("api_keys")
        ]
        key = new_key(keys_file, "local") if keyless else None
        for application in keyless:
            application["args"]["api_keys"] = str(keys_file)
        phase(f"deploying {', '.join(application.get('name', 'default') for application in applications)}")
        urls = deploy(data, ray.dashboard_url, timeout_s).urls
        print("\n".join(address_lines(urls, key)), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


def _print_phase(began: float, text: str) -> None:
    print(f"serve: {time.monotonic() - began:.1f} s  {text}", file=sys.stderr, flush=True)


def _check_gateways(data: JsonMapping, source: str) -> None:
    """Raise MarlRayError if a gateway of a Serve config names what cannot be read; the config has passed the linter."""
    from marl_ray.serving.service import check_gateway  # imports torch

    for number, application in enumerate(data["applications"]):
        if application["import_path"] in IMPORT_PATHS:
            try:
                check_gateway(GatewayConfig.model_validate(application.get("args") or {}))
            except MarlRayError as error:
                raise MarlRayError(f"{source}: applications.{number}.args.{error}") from error


def address_lines(urls: Mapping[str, str], key: str | None) -> list[str]:
    """Return the gateways' addresses, by name, and what another terminal exports to reach the first of them."""
    lines = [f"{name} runs at {url}, its page at {url}/ui" for name, url in urls.items()]
    exports = {KEY_VARIABLE: key, GATEWAY_VARIABLE: next(iter(urls.values()))}
    return [*lines, *(f"export {name}={value}" for name, value in exports.items() if value), "serving until Ctrl-C"]
