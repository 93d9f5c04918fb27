"""Signs that a text of a config is a secret in plain sight, as a variable's name or a password in a URL tell.

A `$` is a character like any other, because a password may have one. Whether `$(NAME)` stands for another variable depends
on the place: Kubernetes fills it in in a pod's environment, and nobody does in a Serve config. So the linter of manifests
leaves such values out before it asks here. `${NAME}` in the variables of a runtime environment is filled in by Ray.
"""

import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(
    r"(PASSWORD|PASSWD|SECRET(_ACCESS)?|TOKEN|API_?KEY|PRIVATE_?KEY|CREDENTIALS?)(_KEY)?$", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@|[?&]password=[^&\s]", re.IGNORECASE)
_RAY_REFERENCE = re.compile(r"\$\{\w+\}")
"""A variable of the machine, which Ray fills in in `env_vars` (`os.path.expandvars`)."""


def names_secret(variable: str) -> bool:
    """Return True if an environment variable of this name holds a secret."""
    return _SECRET_NAME.search(variable) is not None


def has_password(url: str) -> bool:
    """Return True if the text is or contains a URL with a password, before its host or as a parameter."""
    return _PASSWORD_IN_URL.search(url) is not None


def secret_variables(env_vars: object) -> list[str]:
    """Return the variables of a runtime environment (its `env_vars`) whose value is a secret in plain sight.

    A value of nothing but references to the machine's own variables is none, and so is a URL whose password is one.
    """
    if not isinstance(env_vars, Mapping):
        return []
    plain_texts = {str(name): _RAY_REFERENCE.sub("", str(value or "")) for name, value in env_vars.items()}
    return [name for name, text in plain_texts.items() if text and (names_secret(name) or has_password(text))]
