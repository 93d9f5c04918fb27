"""How a call of a tool fails."""


class WrongArguments(Exception):
    """The arguments do not fit the tool; the text says which and why, in one line."""


class ToolTimeout(Exception):
    """The tool gave no result in time."""


class ToolFailed(Exception):
    """The tool could not do it; the text is what the agent reads."""
