"""Reads, applies and deletes objects of any kind; the field manager `marl-ray` owns what is applied."""

from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import quote

from marl_ray.cluster.kuberay.client.connection import Connection, Query, RequestRefusedError
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject

FIELD_MANAGER = "marl-ray"
RAY_API_VERSION = "ray.io/v1"
ALREADY_EXISTS = "AlreadyExists"
"""Reason of the 409 for a name that is taken. A 409 of another reason is a conflict over fields, versions or quotas."""
_STRICT_PARAMETERS = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}


@lru_cache(maxsize=64)
def _kinds(connection: Connection, api_version: str) -> Mapping[str, tuple[str, bool]]:
    """Return kind -> its name in paths, and whether it lies in a namespace, for one version of an API."""
    answer = connection.request("GET", _root(api_version))
    if answer.get("kind") != "APIResourceList":
        raise MarlRayError(f"{connection.server}: expected a Kubernetes API, which lists its resources")
    return {
        described["kind"]: (described["name"], described["namespaced"])
        for described in answer["resources"]
        if "/" not in described["name"]
    }


def _root(api_version: str) -> str:
    """Return the root of an API's paths; Kubernetes' oldest group, which has no name, has one of its own."""
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def path_of(connection: Connection, api_version: str, kind: str, name: str | None = None) -> str:
    """Return the path of an object, or of all of a kind.

    Raises MarlRayError for a kind that the cluster does not know.
    """
    try:
        kinds = _kinds(connection, api_version)
    except RequestRefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        kinds = {}
    if kind not in kinds:
        hint = "; is KubeRay's operator installed, with its CRDs?" if api_version == RAY_API_VERSION else ""
        raise MarlRayError(f"the cluster {connection.server} knows no {kind} of {api_version}{hint}")
    plural, namespaced = kinds[kind]
    namespace_path = f"/namespaces/{quote(connection.namespace, safe='')}" if namespaced else ""
    return f"{_root(api_version)}{namespace_path}/{plural}" + (f"/{quote(name, safe='')}" if name else "")


def read(connection: Connection, kind: str, name: str, api_version: str = RAY_API_VERSION) -> JsonObject | None:
    """Return an object of this name; None if there is none."""
    try:
        return connection.request("GET", path_of(connection, api_version, kind, name))
    except RequestRefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None


def list_all(
    connection: Connection, kind: str, api_version: str = RAY_API_VERSION, labels: str = "", fields: str = ""
) -> list[JsonObject]:
    """Return the objects of a kind, chosen by selectors of labels and fields."""
    query = {"labelSelector": labels} if labels else {}
    query |= {"fieldSelector": fields} if fields else {}
    answer = connection.request("GET", path_of(connection, api_version, kind), query)
    # Items of built-in kinds do not say what they are.
    return [{"kind": kind, "apiVersion": api_version, **item} for item in answer.get("items") or ()]


def apply(connection: Connection, manifest: JsonMapping, force: bool = False, dry_run: bool = False) -> JsonObject:
    """Apply an object on the server's side with strict validation and return the object as it is then.

    `force` takes over fields that others have set. Of several who apply a new object at once, one makes it and the
    others change it. Raises RequestRefusedError for unknown fields, wrong values and conflicts, and MarlRayError for a
    manifest without name or of another namespace.
    """
    kind, api_version, metadata = (manifest.get(key) for key in ("kind", "apiVersion", "metadata"))
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not (name and all(isinstance(text, str) for text in (kind, api_version, name))):
        raise MarlRayError(f"{kind or 'manifest'}: expected apiVersion, kind and metadata.name, each a text")
    assert isinstance(kind, str) and isinstance(metadata, Mapping)
    if metadata.get("namespace", connection.namespace) != connection.namespace:
        raise MarlRayError(
            f"{kind} {metadata['name']}: metadata.namespace is {metadata['namespace']}, "
            f"expected {connection.namespace} (--namespace)"
        )
    query: dict[str, str | bool] = {**_STRICT_PARAMETERS, "force": force}
    query |= {"dryRun": "All"} if dry_run else {}
    path = path_of(connection, manifest["apiVersion"], kind, name)
    try:
        return _send_apply(connection, path, query, manifest)
    except RequestRefusedError as error:
        # The other conflict is a manifest with the `resourceVersion` of an older object.
        is_conflict = error.status == HTTPStatus.CONFLICT and error.reason != ALREADY_EXISTS
        hint = "; --force takes these fields over" if is_conflict and "resourceVersion" not in metadata else ""
        raise RequestRefusedError(error.status, f"{kind} {name}: {error}{hint}", error.reason) from None


def _send_apply(connection: Connection, path: str, query: Query, manifest: JsonMapping) -> JsonObject:
    """Return the answer to an apply, which is sent again where somebody else makes the object at the same moment.

    The second apply changes that object. Raises RequestRefusedError.
    """
    content = dict(manifest), "application/apply-patch+yaml"
    try:
        return connection.request("PATCH", path, query, *content)
    except RequestRefusedError as error:
        if error.reason != ALREADY_EXISTS:
            raise
    return connection.request("PATCH", path, query, *content)


def create(connection: Connection, manifest: JsonMapping, dry_run: bool = False) -> JsonObject | None:
    """Make an object with strict validation, and return it; None if there is one of its name, which stays as it is.

    Of several who ask at once, one makes it. Raises RequestRefusedError for unknown fields, wrong values, and a
    conflict over anything but the name, such as a quota that others use at the same time.
    """
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    path = path_of(connection, manifest["apiVersion"], kind)
    query = _STRICT_PARAMETERS | ({"dryRun": "All"} if dry_run else {})
    try:
        return connection.request("POST", path, query, dict(manifest))
    except RequestRefusedError as error:
        if error.reason != ALREADY_EXISTS:
            raise RequestRefusedError(error.status, f"{kind} {name}: {error}", error.reason) from None
        return None


def delete(connection: Connection, kind: str, name: str, api_version: str = RAY_API_VERSION) -> bool:
    """Delete an object and what it owns, and return True; False if there is none.

    The call returns before they are gone.
    """
    path = path_of(connection, api_version, kind, name)
    try:
        connection.request("DELETE", path, {"propagationPolicy": "Background"})
    except RequestRefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return False
    return True
