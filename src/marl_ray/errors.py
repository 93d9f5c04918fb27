"""The errors that users see as a single line."""


class MarlRayError(Exception):
    """A mistake the user can fix: the message names the key, file or argument and what was expected.

    The command line prints it as one line and exits with status 2; the gateway maps its own subclass to HTTP 4xx.
    Anything else that escapes is a defect of the product and keeps its traceback.
    """


class FieldError(MarlRayError):
    """A mistake in one field of what somebody has sent; the text is `FIELD: MESSAGE`."""

    def __init__(self, field: str, message: str):
        super().__init__(field, message)  # both, because the error may cross processes by pickle
        self.field, self.message = field, message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def one_line(error: BaseException) -> str:
    """First line of an error's text, for messages that quote a library's error."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def named(error: BaseException) -> str:
    """An error in one line: a MarlRayError by its text, any other with its kind."""
    text, kind = one_line(error), type(error).__name__
    return text if isinstance(error, MarlRayError) or text.startswith(kind) else f"{kind}: {text}"
