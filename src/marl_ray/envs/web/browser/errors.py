"""Faults of the browser or of a page, which end in a defined result of the episode."""


class BrowserFault(Exception):
    """The browser or a page did not do what it was asked; the text is one line that says what."""


class PageFault(BrowserFault):
    """The page can be used no more: it crashed, or it answers nothing before its deadline."""


class ActionFault(BrowserFault):
    """The action cannot be done; the page is as it was."""
