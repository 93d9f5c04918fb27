"""Errors that a tool raises when a call of it fails."""


class WrongArguments(Exception):
    """The arguments do not fit the tool; the text names the argument and the reason, in one line."""


class ToolTimeout(Exception):
    """The tool gave no result before its deadline."""


class ToolFailed(Exception):
    """The tool could not do its work; the agent reads the text."""
