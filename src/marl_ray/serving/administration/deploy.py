"""Hand a Serve config to a cluster and wait until it runs."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.ray_seams import dashboard_client
from marl_ray.serving.administration.lint import read_serve_config

if TYPE_CHECKING:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

REQUEST_S = 60.0
"""Seconds that one request to the dashboard may take; the first one starts Serve's controller."""
RESUBMIT_S = 1.0
"""Seconds between two attempts to submit a config to a dashboard that is busy."""
_POLL_S = 0.25
"""Seconds between looks at an application that starts."""


@dataclass(frozen=True)
class RunningApplications:
    """The applications that a deployment has left running."""

    urls: dict[str, str]
    """Name -> URL, as reached from the machine whose address the Serve config names."""


def deploy(
    config: str | Path | JsonMapping, dashboard_url: str = "http://127.0.0.1:8265", timeout_s: float = 300.0
) -> RunningApplications:
    """Deploy a Serve config and wait until every application runs.

    The config lists all applications: Serve deletes those of an earlier config that it does not name. Raises
    MarlRayError if the config is wrong, the cluster cannot be reached, an application fails to deploy (with the reason)
    or does not run within `timeout_s` seconds (it is left as it is).
    """
    deadline = time.monotonic() + timeout_s
    data = read_serve_config(config)
    client = _connect(dashboard_url)
    _check_http_options(data, _read_details(client))
    _submit(client, data, dashboard_url, deadline)
    names = [application.get("name", "default") for application in data["applications"]]
    while True:
        details = _read_details(client)
        states = {name: details["applications"].get(name, {"status": "MISSING", "message": ""}) for name in names}
        for name, state in states.items():
            if state["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise MarlRayError(f"application {name!r} is {state['status']}: {_find_reason(_join_messages(state))}")
        http = details["http_options"]
        proxies = {proxy["status"] for proxy in details["proxies"].values()} or {"MISSING"}
        are_proxies_ready = proxies == {"HEALTHY"} or data.get("proxy_location") == "Disabled"
        if are_proxies_ready and all(state["status"] == "RUNNING" for state in states.values()):
            prefixes = {name: (state.get("route_prefix") or "/").rstrip("/") for name, state in states.items()}
            return RunningApplications(
                {name: f"http://{http['host']}:{http['port']}{prefixes[name]}" for name in names}
            )
        if time.monotonic() > deadline:
            waiting = [f"{name!r} is {state['status']}{_describe_progress(state)}" for name, state in states.items()]
            if not are_proxies_ready:  # Serve tries again for ever, and says why only in the node's log
                waiting.append(f"the HTTP proxy is {'/'.join(sorted(proxies))} (is port {http['port']} taken?)")
            raise MarlRayError(f"after {timeout_s:g} s not everything runs: {', '.join(waiting)}")
        time.sleep(_POLL_S)


def _submit(client: "ServeSubmissionClient", data: JsonObject, dashboard_url: str, deadline: float) -> None:
    """Send the config, again and again until Serve takes it or the deadline passes.

    The first request starts Serve's controller, and on a busy machine the dashboard may time out on it (5xx). Sending
    the same config twice does no harm.
    """
    while True:
        try:
            client.deploy_applications(data)
            return
        except (OSError, RuntimeError) as error:  # requests' errors are OSErrors
            may_retry = isinstance(error, OSError) or "status code 5" in str(error)
            if not may_retry or time.monotonic() > deadline:
                reason = _find_reason(str(error)) or type(error).__name__
                raise MarlRayError(f"{dashboard_url}: Serve refuses the config: {reason}") from error
        time.sleep(RESUBMIT_S)


def _check_http_options(data: JsonMapping, details: JsonMapping) -> None:
    """Refuse other HTTP options than Serve was started with.

    Serve would keep the old ones and only log a warning.
    """
    running = details.get("http_options") if details.get("controller_info", {}).get("actor_id") else None
    for key, value in (data.get("http_options") or {}).items():
        if running and running.get(key, value) != value:
            raise MarlRayError(
                f"http_options.{key}: Serve already runs with {running[key]!r}, not {value!r}; stop it first"
            )


def _connect(dashboard_url: str) -> "ServeSubmissionClient":
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return dashboard_client(ServeSubmissionClient, dashboard_url, REQUEST_S)


def _read_details(client: "ServeSubmissionClient") -> JsonObject:
    try:
        details: JsonObject = client.get_serve_details()
    except (OSError, RuntimeError) as error:
        raise MarlRayError(f"the dashboard does not report the state of Serve: {_find_reason(str(error))}") from error
    return details


def _join_messages(state: JsonMapping) -> str:
    deployments = state.get("deployments", {}).values()
    return "\n".join(
        [str(state.get("message", "")), *(str(deployment.get("message", "")) for deployment in deployments)]
    )


def _describe_progress(state: JsonMapping) -> str:
    """Return how many of an application's replicas run, in brackets, with what Serve says of the others.

    The text is empty if there are none.
    """
    replicas = [r["state"] for d in state.get("deployments", {}).values() for r in d["replicas"]]
    if not replicas:
        return ""
    message = " ".join(_join_messages(state).split())
    return f" ({replicas.count('RUNNING')} of {len(replicas)} replicas run{': ' + message if message else ''})"


def _find_reason(text: str) -> str:
    """Return the line of a traceback that names the cause.

    The line is our own error's if there is one, else the last line. In a chain of errors the outermost error stands
    last.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        head, mark, message = line.partition("MarlRayError: ")
        if mark and not head.startswith("raise"):
            return message
    return lines[-1] if lines else "no reason given"
