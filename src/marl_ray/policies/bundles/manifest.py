"""`bundle.json`, the description of a bundle, and the functions that write, find and check a bundle."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from marl_ray.config import NetworkConfig, resolve_tracking_uri
from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError, did_you_mean, one_line
from marl_ray.json_types import JsonObject
from marl_ray.policies.bundles.mlflow_client import mlflow_client
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS
from marl_ray.temporary_folders import temporary_folder

FORMAT = 1
"""Version of the keys of `bundle.json`; a bundle of another version is refused."""
MANIFEST_FILE = "bundle.json"
REGISTRY_PREFIX = "models:/"
"""Prefix of references to a model registry."""
MAX_COMPARED_MODELS = 1000
"""Models of a registry whose names a misspelt one is compared with: what MLflow returns at most in one page."""
MAX_LISTED_VERSIONS = 10
"""Versions of a model, the newest, that an error lists."""


class Origin(BaseModel):
    """The checkpoint of another run that a run has begun from."""

    model_config = ConfigDict(extra="forbid")
    run: str
    steps: int
    """Environment steps that the other run had trained, which count as steps of this run."""
    checkpoint: str
    """Folder or URI."""


class Lineage(BaseModel):
    """The origin of a bundle: run, config, code and metrics."""

    model_config = ConfigDict(extra="forbid")
    run: str
    algorithm: dict[str, str]
    """Policy -> algorithm."""
    config_hash: str
    code_version: str
    seed: int
    env: JsonObject
    steps: int
    """Environment steps trained."""
    metrics: dict[str, float]
    origin: Origin | None = Field(None, exclude_if=lambda origin: origin is None)
    """Set where the run has `resume_from`."""


class PolicyManifest(BaseModel):
    """One actor-critic of a bundle."""

    model_config = ConfigDict(extra="forbid")
    network: NetworkConfig
    observation_space: JsonObject
    action_space: JsonObject
    weights: str
    sha256: str


class TokenPolicyManifest(BaseModel):
    """One language model of a bundle; its files are in a folder of the policy's name."""

    model_config = ConfigDict(extra="forbid")
    generation: GenerationConfig
    context: PositiveInt
    chat: bool | None
    files: dict[str, str]
    """File name -> sha256; the folder holds these and no others."""


class _BaseManifest(BaseModel):
    """The keys of `bundle.json` that all families have."""

    model_config = ConfigDict(extra="forbid")
    format: int = FORMAT
    agents: dict[str, str]
    """Agent -> policy."""
    lineage: Lineage
    digest: str = ""

    def content_digest(self) -> str:
        """Return the sha256 (hex) of everything but the digest."""
        content = json.dumps(self.model_dump(mode="json", exclude={"digest"}), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def weights_sha256(self) -> str:
        """sha256 (hex) of the weights that every agent plays with.

        The hash does not depend on the run that wrote them, nor on the names of policies and files.
        """
        weights = {agent: self._weights_of(policy) for agent, policy in self.agents.items()}
        return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()

    def _weights_of(self, policy: str) -> list[str]:
        """Return the sha256 of the policy's files of weights."""
        raise NotImplementedError


class Manifest(_BaseManifest):
    """`bundle.json` of actor-critics."""

    family: Literal["actor_critic"] = "actor_critic"
    policies: dict[str, PolicyManifest]

    def _weights_of(self, policy: str) -> list[str]:
        return [self.policies[policy].sha256]


class TokenManifest(_BaseManifest):
    """`bundle.json` of language models."""

    family: Literal["token"] = "token"
    policies: dict[str, TokenPolicyManifest]

    def _weights_of(self, policy: str) -> list[str]:
        # The weights beside an adapter contain it already.
        files = self.policies[policy].files.items()
        return sorted(sha256 for name, sha256 in files if "/" not in name and name.endswith(".safetensors"))


class BaseBundle:
    """An object with a manifest: a bundle, or an arm's model that takes the place of one."""

    manifest: _BaseManifest

    @property
    def digest(self) -> str:
        """The digest of the manifest: sha256 (hex)."""
        return self.manifest.digest

    @property
    def agents(self) -> dict[str, str]:
        """Agent -> policy."""
        return self.manifest.agents


MANIFEST_TYPES: Mapping[str, type[Manifest] | type[TokenManifest]] = {"actor_critic": Manifest, "token": TokenManifest}


class _FormatAndFamily(BaseModel):
    """The keys of `bundle.json` that say how to read the others."""

    format: int = FORMAT
    family: str = "actor_critic"


def publish(folder: str | Path, write: Callable[[Path], Manifest | TokenManifest]) -> Path:
    """Make `folder/DIGEST[:DIGEST_DIGITS]` of the files that `write` writes, and return its path.

    Readers see the folder complete or absent, whatever fails. One that is there already, such as a damaged one, is
    replaced. Raises OSError, with which it stays as it was, and what `write` raises.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".bundle-", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary) / "bundle"
        work.mkdir()
        manifest = write(work)
        manifest.digest = manifest.content_digest()
        (work / MANIFEST_FILE).write_text(json.dumps(manifest.model_dump(mode="json"), indent=1), encoding="utf-8")
        target = folder / manifest.digest[:DIGEST_DIGITS]
        previous = Path(temporary) / "previous"
        if target.exists():
            os.replace(target, previous)
        try:
            os.replace(work, target)
        except OSError:
            if previous.exists():
                os.replace(previous, target)
            raise
    return target


@contextmanager
def local_folder(reference: str, uri: str | None) -> Iterator[Path]:
    """Yield the folder of a bundle, within the block.

    A download from an MLflow registry (`models:/name/version` or `models:/name@alias`) is deleted afterwards. `uri` is
    the registry's tracking URI; None takes the default of the product.
    """
    if not reference.startswith(REGISTRY_PREFIX):
        yield Path(reference)
        return
    import mlflow

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    uri = resolve_tracking_uri(uri)
    name, _, version = pin_reference(reference, uri).removeprefix(REGISTRY_PREFIX).rpartition("/")
    with temporary_folder("bundle") as temporary:
        with _naming_reference(reference, uri):
            client = mlflow_client(uri, reads=True)
            # The client of this registry resolves the version: `download_artifacts` would ask the registry of the whole
            # process.
            source = client.get_model_version_download_uri(name, version)
            path = mlflow.artifacts.download_artifacts(source, dst_path=str(temporary), tracking_uri=uri)
        yield Path(path)


def pin_reference(reference: str, uri: str | None) -> str:
    """Return a reference that always means the same bundle.

    `models:/name@alias` becomes the version that has the alias now. Raises MarlRayError for a reference of
    another form, and for an alias that the registry does not have.
    """
    path = reference.removeprefix(REGISTRY_PREFIX)
    if path == reference or "/" in path:
        return reference
    name, _, alias = path.rpartition("@")
    if not name or not alias:
        raise MarlRayError(f"bundle {reference!r}: expected models:/name/version or models:/name@alias")
    uri = resolve_tracking_uri(uri)
    with _naming_reference(reference, uri):
        version = mlflow_client(uri, reads=True).get_model_version_by_alias(name, alias).version
    return f"{REGISTRY_PREFIX}{name}/{version}"


@contextmanager
def _naming_reference(reference: str, uri: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # MLflow raises errors of many types; each means that this registry has no such version
        reason = f"{one_line(error)}{_suggest_reference(reference, uri)}"
        raise MarlRayError(f"bundle {reference!r} is not in the model registry: {reason}") from error


def _suggest_reference(reference: str, uri: str) -> str:
    """Return the end of an error about a bundle that the registry does not have.

    The text names models, or the versions of the model that is there; it is empty if the registry has the bundle, or no
    model at all.
    """
    name, version, *_ = [*re.split("[/@]", reference.removeprefix(REGISTRY_PREFIX)), ""]
    try:
        client = mlflow_client(uri, reads=True)
        # The model is asked for by its name, because a search without a filter returns one page of the registry.
        if not client.search_registered_models(f"name='{name}'"):
            names = [model.name for model in client.search_registered_models(max_results=MAX_COMPARED_MODELS)]
            return did_you_mean(name, names) if names else ""
        versions = sorted(int(each.version) for each in client.search_model_versions(f"name='{name}'"))
    except Exception:  # the registry does not answer, which the error says already
        return ""
    newest = ", ".join(map(str, versions[-MAX_LISTED_VERSIONS:]))
    count = len(versions) - MAX_LISTED_VERSIONS
    earlier = f" or {count} earlier one{'s' if count > 1 else ''}" if count > 0 else ""
    is_there = version in map(str, versions) or not versions
    return "" if is_there else f"; its version{'s are' if len(versions) > 1 else ' is'} {newest}{earlier}"


def read_manifest(folder: Path) -> Manifest | TokenManifest:
    """Read a bundle's manifest and check its digest.

    Raises MarlRayError if it is missing, malformed or of an unknown kind.
    """
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
        kind = _FormatAndFamily.model_validate_json(raw)
        if kind.format != FORMAT or kind.family not in MANIFEST_TYPES:
            raise MarlRayError(
                f"bundle {str(folder)!r}: format {kind.format} of {kind.family!r} is not supported; expected format "
                f"{FORMAT} of {' or '.join(MANIFEST_TYPES)}"
            )
        manifest = MANIFEST_TYPES[kind.family].model_validate_json(raw)
    except OSError as error:
        places = {"folder": folder / "bundle", "name": Path("runs") / folder / "bundle"}
        runs = [(what, inner) for what, inner in places.items() if (inner / MANIFEST_FILE).is_file()]
        instead = ""
        if runs:
            instead = "; it is the {} of a run, whose bundle is {}".format(*runs[0])
        elif not folder.exists():
            instead = f"; expected a bundle's folder, {REGISTRY_PREFIX}NAME/VERSION or {REGISTRY_PREFIX}NAME@ALIAS"
        raise MarlRayError(
            f"bundle {str(folder)!r} has no readable {MANIFEST_FILE}: {error.strerror}{instead}"
        ) from error
    except ValidationError as error:
        raise MarlRayError(f"bundle {str(folder)!r}: {MANIFEST_FILE}: {first_mistake(error)}") from error
    if manifest.content_digest() != manifest.digest:
        raise MarlRayError(f"bundle {str(folder)!r}: content hash of {MANIFEST_FILE} does not fit its digest")
    return manifest


def check_file(folder: Path, name: str, sha256: str) -> Path:
    """Return the path of the bundle's file `name`.

    Raises MarlRayError if the file is missing or its content differs from the manifest.
    """
    path = folder / name
    if not path.is_file():
        raise MarlRayError(f"bundle {str(folder)!r}: {name} is missing")
    if file_hash(path) != sha256:
        raise MarlRayError(f"bundle {str(folder)!r}: content hash of {name} does not fit {MANIFEST_FILE}")
    return path


def file_hash(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_models(folder: Path, manifest: TokenManifest) -> None:
    """Raise MarlRayError unless the models' folders hold exactly the files of the manifest."""
    for name, policy in manifest.policies.items():
        if Path(name).name != name:
            raise MarlRayError(f"bundle {str(folder)!r}: policy {name!r} must be a plain folder name")
        # One more file, such as an index of other weights or an adapter, could change how transformers reads a model.
        files = {str(path.relative_to(folder / name)) for path in (folder / name).rglob("*") if not path.is_dir()}
        for extra in sorted(files - set(policy.files)):
            raise MarlRayError(f"bundle {str(folder)!r}: {name}/{extra} is not in {MANIFEST_FILE}")
        for file, sha256 in policy.files.items():
            check_file(folder, f"{name}/{file}", sha256)
