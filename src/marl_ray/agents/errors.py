"""Errors that a tool raises when a call of it fails."""


class ToolArgumentsError(Exception):
    """The arguments do not fit the tool; the text names the argument and the reason, in one line."""


class ToolTimeoutError(Exception):
    """The tool gave no result before its deadline."""


class ToolError(Exception):
    """The tool could not do its work; the agent reads the text."""
