"""Requests to a Kubernetes API, with plain data in and out, deadlines and short errors.

They are for custom and built-in kinds alike. The `kubernetes` package brings kubeconfig, credentials of pods, TLS and
proxies. The package's typed models would refuse or drop what a newer server sends.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

from marl_ray.cluster.waits import CONNECT_S, LOST_S, READ_S
from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonObject

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
"""Seconds between two tries of a request; the pause doubles from the first to the maximum."""
TRANSIENT_STATUSES = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Statuses that a later try may not meet."""

_KUBECONFIG_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError)
"""Errors that the package raises for a file that is no kubeconfig."""

Query = Mapping[str, str | int | bool]
Result = TypeVar("Result")


class RequestRefusedError(MarlRayError):
    """The API server refuses a request, and would do so again."""

    def __init__(self, status: int, message: str, reason: str = ""):
        super().__init__(message)
        self.status = status
        self.reason = reason
        """Kubernetes' word for the refusal, which tells statuses of one number apart; empty where the server has none."""


class _UnreachableError(Exception):
    """A request that may succeed later."""


@dataclass(frozen=True)
class Connection:
    """A client of a cluster's API, and the namespace that it works in."""

    api: client.ApiClient
    namespace: str

    @property
    def server(self) -> str:
        """The API's URL."""
        return str(self.api.configuration.host)

    def request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        content_type: str = "application/json",
        lost_s: float = LOST_S,
    ) -> JsonObject:
        """Return the answer's JSON, after further tries for `lost_s` seconds while the server cannot answer.

        Raises RequestRefusedError with the server's message, or MarlRayError where it stayed out of reach.
        """
        return retry_while_unreachable(
            lambda: self._json(method, path, query, body, content_type), lost_s, f"the API server {self.server}"
        )

    def lines(self, path: str, query: Query, read_s: float) -> Iterator[bytes]:
        """Yield the lines of an answer as they come, until it ends or says nothing for `read_s` seconds.

        Raises RequestRefusedError. A connection that breaks ends the lines, too: whoever reads asks again.
        """
        try:
            response = self._send("GET", path, query, None, "application/json", read_s)
            partial_line = b""
            for chunk in response.response.stream(None, decode_content=True):
                *lines, partial_line = (partial_line + chunk).split(b"\n")
                yield from lines
            if partial_line:
                yield partial_line
        except (_UnreachableError, urllib3.exceptions.HTTPError, OSError):
            return

    def _json(self, method: str, path: str, query: Query | None, body: object, content_type: str) -> JsonObject:
        answer = self._send(method, path, query, body, content_type, READ_S).read()
        try:
            return dict(json.loads(answer or b"{}"))
        except (ValueError, TypeError) as error:
            raise MarlRayError(f"{self.server}: expected JSON from a Kubernetes API ({one_line(error)})") from None

    def _send(
        self, method: str, path: str, query: Query | None, body: object, content_type: str, read_s: float
    ) -> client.rest.RESTResponse:
        query_params = [
            (name, str(value).lower() if isinstance(value, bool) else value) for name, value in (query or {}).items()
        ]
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if body is not None else {})
        request = self.api.param_serialize(
            method, path, query_params=query_params, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = self.api.call_api(*request, _request_timeout=(CONNECT_S, read_s))
        except (ApiException, urllib3.exceptions.LocationValueError) as error:  # a fault of TLS, or of the URL
            raise MarlRayError(f"{self.server}: {one_line(error)}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _UnreachableError(one_line(error)) from error
        if 200 <= response.status < 300:
            return response
        message, reason = _refusal(response)
        if response.status in TRANSIENT_STATUSES:
            raise _UnreachableError(f"{response.status} {message}")
        hint = f"{self.server} takes no such credentials: " if response.status == HTTPStatus.UNAUTHORIZED else ""
        raise RequestRefusedError(response.status, f"{hint}{message}", reason)


def retry_while_unreachable(call: Callable[[], Result], lost_s: float, server: str) -> Result:
    """Return the result of a call that is tried again while it raises `_UnreachableError`.

    Raises MarlRayError after `lost_s` seconds.
    """
    end, pause = time.monotonic() + lost_s, FIRST_PAUSE_S
    while True:
        try:
            return call()
        except _UnreachableError as error:
            if time.monotonic() + pause >= end:
                raise MarlRayError(f"{server} gave no answer for {lost_s:g} s: {error}") from None
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def _refusal(response: client.rest.RESTResponse) -> tuple[str, str]:
    """Return the server's message in one line, and Kubernetes' reason, from a `Status` object or a plain body.

    A plain body has no reason.
    """
    text = (response.read() or b"").decode("utf-8", "replace")
    try:
        status = json.loads(text)
        message, reason = status["message"], status.get("reason", "")
    except (ValueError, LookupError, TypeError):
        message, reason = text, ""
    return " ".join(str(message).split()) or str(response.reason), str(reason)


def connect(kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None) -> Connection:
    """Return a connection by a kubeconfig file, or by the pod's own account.

    The file is KUBECONFIG or ~/.kube/config where not given, and the namespace is the context's, or the pod's, where
    not given. Raises MarlRayError if there is neither file nor account.
    """
    chosen_path = kubeconfig or os.environ.get("KUBECONFIG")  # the package reads the variable only once, at import
    path = chosen_path or "~/.kube/config"
    if not (chosen_path or context or Path(os.path.expanduser(path)).exists()):
        return _connect_by_pod(namespace)
    configuration = client.Configuration()
    try:
        contents = KubeConfigMerger(path).config
        if contents is None:
            raise config.ConfigException("there is no such file, or it is empty")
        names = [entry["name"] for entry in contents["contexts"]]
        if context is not None and context not in names:
            raise MarlRayError(f"--context {context}: the kubeconfig has {', '.join(names)}")
        loader = KubeConfigLoader(contents, context, config_base_path=None)  # paths are relative to their file
        loader.load_and_set(configuration)
        current = loader.current_context["context"]
    except (config.ConfigException, *_KUBECONFIG_ERRORS) as error:
        raise MarlRayError(f"kubeconfig {path}: expected a kubeconfig ({one_line(error)})") from None
    return _make_connection(configuration, namespace or current.get("namespace") or "default")


def _connect_by_pod(namespace: str | None) -> Connection:
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        raise MarlRayError(
            "no cluster is named: expected KUBECONFIG, ~/.kube/config or a pod's service account"
        ) from None
    namespace_file = Path("/run/secrets/kubernetes.io/serviceaccount/namespace")
    name = namespace or (namespace_file.read_text().strip() if namespace_file.is_file() else "default")
    return _make_connection(configuration, name)


def _make_connection(configuration: client.Configuration, namespace: str) -> Connection:
    configuration.retries = False  # `retry_while_unreachable` tries again, and says nothing on the way
    return Connection(client.ApiClient(configuration), namespace)
