"""Faults of the browser or of a page, which end in a defined result of the episode."""


class BrowserError(Exception):
    """The browser or a page did not do what it was asked; the text is one line that says what."""


class PageError(BrowserError):
    """The page can be used no more: it crashed, or it answers nothing before its deadline."""


class ActionError(BrowserError):
    """The action cannot be done; the page is as it was."""
