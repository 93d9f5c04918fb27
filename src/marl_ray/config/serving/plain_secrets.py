"""Signs that a text of a config is a secret in plain sight, as a variable's name or a password in a URL tell.

A `$` is a character like any other, because a password may have one. Whether `$(NAME)` stands for another variable depends
on the place: Kubernetes fills it in in a pod's environment, and nobody does in a Serve config. So the linter of manifests
leaves such values out before it asks here.
"""

import re

_SECRET_NAME = re.compile(
    r"(PASSWORD|PASSWD|SECRET(_ACCESS)?|TOKEN|API_?KEY|PRIVATE_?KEY|CREDENTIALS?)(_KEY)?$", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@|[?&]password=", re.IGNORECASE)


def names_secret(variable: str) -> bool:
    """Return True if an environment variable of this name holds a secret."""
    return _SECRET_NAME.search(variable) is not None


def has_password(url: str) -> bool:
    """Return True if the text is or contains a URL with a password, before its host or as a parameter."""
    return _PASSWORD_IN_URL.search(url) is not None
