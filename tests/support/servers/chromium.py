"""A real headless Chromium: the fixture, what its reader prefers, and pictures kept as artefacts of the tests."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from servers.installed import find, need

ARTEFACTS = Path(__file__).parents[2] / "artefacts"
WAIT_S = 30
"""Deadline of a page, in seconds."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    need("Chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = str(find("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(find("chromedriver")))
    window.set_page_load_timeout(WAIT_S)
    try:
        yield window
    finally:
        window.quit()


def look(browser: Any, width: int = 1280, dark: bool = False) -> None:
    """Set the window's width and the reader's preference."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def keep(browser: Any, name: str) -> None:
    """A screenshot of the whole page, as `tests/artefacts/NAME.png`."""
    ARTEFACTS.mkdir(exist_ok=True)
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    (ARTEFACTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
