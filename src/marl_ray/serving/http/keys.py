"""API keys: who may act, post outcomes, read about experiments, and change them."""

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from marl_ray.config import read_yaml
from marl_ray.config.base import Config
from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.errors import MarlRayError
from marl_ray.serving.http.messages import Request, RequestError

Permission = Literal["inference", "outcomes", "read", "admin"]
ANYONE = "anyone"
"""Name of the key of every request where there is no file of keys."""


class Key(Config):
    """One key in the file of keys."""

    name: str = Field(min_length=1, max_length=100)
    """Name by which the audit log and the limits of rates know the key."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hexadecimal SHA-256 of the secret, which the file does not hold."""
    scopes: tuple[Permission, ...] = Field(min_length=1)
    """Permissions of the key."""


class KeyFile(Config):
    """The file of keys."""

    keys: tuple[Key, ...] = Field(min_length=1)


class Keys:
    """The keys of a gateway.

    Without a file anybody may act, post outcomes and read, and nobody may change an experiment.
    """

    def __init__(self, path: str | None):
        """Read the file of keys. Raises MarlRayError naming `api_keys` if it is not one."""
        self.keys: tuple[Key, ...] = ()
        if path is not None:
            try:
                data = read_yaml(Path(path))
                self.keys = KeyFile.model_validate(data).keys
            except MarlRayError as error:
                raise MarlRayError(f"api_keys: {error}") from error
            except ValidationError as error:
                # A value is not shown, because it may be a secret in the place of its hash.
                mistake = first_mistake(error, data, KeyFile, shows_values=False)
                raise MarlRayError(f"api_keys: {path!r}: {mistake}") from None

    def check(self, request: Request, *permissions: Permission) -> str:
        """Return the name of the key in the request, which must have one of these scopes.

        The key is in the header `authorization: Bearer KEY`. Raises RequestError 401 or 403.
        """
        if not self.keys:
            return self.check_secret("", *permissions) if permissions == ("admin",) else ANYONE
        authorization = request.header(b"authorization") or ""
        kind, _, secret = authorization.partition(" ")
        if kind.lower() == "basic" and "read" in permissions:
            # Browsers send these credentials by themselves, also for pages of other sites, so they allow only reading.
            return self.check_secret(_password(secret), "read")
        return self.check_secret(secret if kind.lower() == "bearer" else "", *permissions)

    def check_secret(self, secret: str, *permissions: Permission) -> str:
        """Return the name of the key with this secret, which must have one of these scopes.

        The scope `admin` includes `read`. Raises RequestError 401 or 403.
        """
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
        # All keys are compared, each in constant time, so that the duration reveals nothing.
        matching_keys = [key for key in self.keys if hmac.compare_digest(key.sha256, digest)]
        if not self.keys and permissions == ("admin",):
            raise RequestError(403, "authorization", "no api_keys are configured, so nobody may change experiments")
        if not matching_keys:
            raise RequestError(401, "authorization", "expected a known key: authorization: Bearer KEY")
        scopes = {*matching_keys[0].scopes, *(("read",) if "admin" in matching_keys[0].scopes else ())}
        if not scopes & set(permissions):
            expected = " or ".join(map(repr, permissions))
            raise RequestError(403, "authorization", f"key {matching_keys[0].name!r} lacks the scope {expected}")
        return matching_keys[0].name


def new_key(path: Path, name: str) -> str:
    """Write a file of keys with one new key, which has all scopes, and return its secret."""
    secret = secrets.token_urlsafe(24)
    key = {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), "scopes": list(get_args(Permission))}
    path.write_text(json.dumps({"keys": [key]}))
    return secret


def _password(credentials: str) -> str:
    """Return the password of `authorization: Basic`, with any user name; empty if there is none."""
    try:
        text = base64.b64decode(credentials, validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return ""
    return text.partition(":")[2]
