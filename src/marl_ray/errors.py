"""The errors that users see as a single line."""

import difflib
import json
import re
from collections.abc import Collection, Iterable
from urllib.parse import unquote, urlsplit


class MarlRayError(Exception):
    """A mistake the user can fix: the message names the key, file or argument and what was expected.

    The command line prints it as one line and exits with status 2; the gateway maps its own subclasses to statuses of HTTP.
    Anything else that escapes is a defect of the product and keeps its traceback.
    """

    shared = False
    """True if all workers of a run raise this error together."""


class FieldError(MarlRayError):
    """A mistake in one field of what somebody has sent; the text is `FIELD: MESSAGE`."""

    def __init__(self, field: str, message: str):
        super().__init__(field, message)  # both, because the error may cross processes by pickle
        self.field, self.message = field, message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, for messages that quote a library's error."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def one_line_without(error: BaseException, path: object) -> str:
    """Return `one_line` without the path and the error's number, for a message that names the path itself."""
    return re.sub(r"^\[Errno \d+\] ", "", one_line(error).removesuffix(f": {str(path)!r}"))


def describe_error(error: BaseException) -> str:
    """Return an error in one line: a MarlRayError by its text, any other with the name of its class."""
    text, class_name = one_line(error), type(error).__name__
    return text if isinstance(error, MarlRayError) or text.startswith(class_name) else f"{class_name}: {text}"


def type_name(value: object) -> str:
    """Return the name of the type of a value of YAML or JSON, for an error that says what was got: `nothing` for null."""
    return "nothing" if value is None else type(value).__name__


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package.

    The command names the checkout where the package is installed as editable; everywhere else pip finds the extra by
    the package's name.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # its import takes as long as all the others

    try:
        installed = json.loads(distribution("marl-ray").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # the sources are on PYTHONPATH alone
        installed = {}
    if installed.get("dir_info", {}).get("editable"):
        return f"pip install -c constraints.txt -e '.[{extra}]' in {unquote(urlsplit(installed['url']).path)}"
    return f"pip install 'marl-ray[{extra}]'"


MAX_COMPARED = 100
"""Maximum number of characters of a name that are compared with the known ones: the million that a request may have would
take a third of a second."""
MAX_LISTED = 20
"""Maximum number of known names that an error lists."""
MIN_SIMILARITY = 0.5
"""Ratio of difflib, of 1, from which a known name counts as close."""

SYNONYMS = {"gpu": "cuda"}
"""Word that people use -> the known name, which is not the one that is closest to it."""


def suggestion(name: str, known: Collection[str], before: str = "") -> str:
    """Return '; did you mean ...?' with the known names that are close to a name; empty if none is.

    A known name that is the initials of `name`, or a synonym, is the only suggestion. If none is close, those that
    begin with `name` are.
    """
    name = name[:MAX_COMPARED]
    initials = "".join(word[:1] for word in name.split("_")) if "_" in name else ""
    lowered = {other.lower(): other for other in known}
    initials = SYNONYMS.get(name.lower(), initials)
    close = (
        [initials]
        if initials in known
        else difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=MIN_SIMILARITY)
    )
    if not close and len(name) > 2:
        close = [other for other in lowered if other.startswith(name.lower())][:3]
    close = [lowered.get(other, other) for other in close]
    return f"; did you mean {' or '.join(before + other for other in close)}?" if close else ""


def did_you_mean(name: str, known: Iterable[str], *further: str, before: str = "") -> str:
    """Return the end of an error about an unknown name.

    The text is '; did you mean ...?' if some known names are close to it, or one is its initials (lr of learning_rate).
    Otherwise it is '; expected one of ...', with up to MAX_LISTED known names and the count of the others. `further`
    describes in words what else is valid. `before` is put before each suggested name, such as the path of a key.
    """
    names = [other for other in known if not other.startswith("_")]
    if guess := suggestion(name, names, before):
        return guess
    listed = ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
    return f"; expected {'one of ' if names else ''}{' or '.join([listed] * bool(names) + list(further))}"
