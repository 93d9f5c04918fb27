"""The gateway's page for people in a real Chromium, over HTTP. Screenshots stay in tests/artefacts/."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from servers.chromium import WAIT_S, browser, keep, look
from stores.single_reports import record_metrics, record_outcome
from toy_serving.gateways import make_bundle, write_keys

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.experiments.assignment.rendezvous import AssignmentTable
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.asgi import Gateway

__all__ = ["browser"]
KEY = "ada"
BASE = "/ab"
HOURS = 6
UNITS = 1500
MEANS = {"mappo": 0.52, "p3o": 0.51, "grpo-wide": 0.58}
COSTS = {"mappo": 1.0, "p3o": 1.075, "grpo-wide": 0.97}


@dataclass(frozen=True)
class Site:
    """A running gateway."""

    url: str
    """With the prefix that it is mounted at."""


def config_in(folder: Path, bundles: dict[str, str]) -> GatewayConfig:
    running = {
        "name": "gridworld",
        "endpoint": "grid",
        "arms": {arm: {"bundle": path} for arm, path in bundles.items()},
        "strategy": "gradual",
        "stages": [0.05, 0.6, 1.0],
        "min_exposures": 5000,  # so that it stays where it is
        "guardrails": [{"name": "cost", "margin": 0.05}, {"name": "error", "margin": 0.02}],
        "min_outcomes": 20,
    }
    draft = running | {"name": "chess", "endpoint": "chess", "strategy": "ab", "autostart": False}
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": str(folder / "spool")}
    keys = write_keys(folder / "keys.yaml", **{KEY: ("admin",), "eve": ("outcomes",)})
    return parse_config(GatewayConfig, where | {"experiments": [running, draft], "api_keys": keys})


def fill(stores: Stores, name: str) -> None:
    """Hours of sessions behind an experiment, which is in its second stage then."""
    stores.experiments.change(name, Action.NEXT_STAGE, epoch=1, actor="gateway", reason="no harm at 0.05 of the units")
    table, noise = AssignmentTable(stores.experiments.assignment_state(name).weights, name, 2), np.random.default_rng(0)
    begun, step = time.time() - HOURS * 3600, HOURS * 3600 / UNITS
    stores.units.record_exposures(
        [Exposure(name, f"s{k}", table.assign(f"s{k}"), begun + step * k) for k in range(UNITS)],
    )
    for k in range(0, UNITS, 2):
        arm, at = table.assign(f"s{k}").arm, begun + step * (k + 1)
        record_outcome(stores.units, name, f"s{k}", float(noise.normal(MEANS[arm], 0.15)), at)
        cost = float(noise.normal(COSTS[arm], 0.2))
        record_metrics(stores.units, name, f"s{k}", {"cost": cost, "error": float(noise.random() < 0.01)}, at)
    counts = {"acts": 12_840, "errors": 3, "dropped": 41, "decisions": 25_680, "agreed": 24_901, "seconds": 22.0}
    stores.units.record_shadows(name, "replica", {"p3o": counts})


@dataclass(frozen=True)
class Filled:
    """A folder with the database of two experiments: one well under way, and a draft."""

    folder: Path
    bundles: dict[str, str]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    folder = tmp_path_factory.mktemp("filled")
    bundles = {arm: make_bundle(folder / arm, k) for k, arm in enumerate(MEANS)}
    config = config_in(folder, bundles)
    Gateway(config).service.close()
    stores = open_stores(config.database, clock=lambda: time.time() - HOURS * 3600)
    fill(stores, "gridworld")
    stores.close()
    return Filled(folder, bundles)


@pytest.fixture
def site(filled: Filled, tmp_path: Path) -> Iterator[Site]:
    """A gateway with these experiments, on its own port."""
    shutil.copy(filled.folder / "experiments.db", tmp_path / "experiments.db")
    gateway = Gateway(config_in(tmp_path, filled.bundles))

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await gateway(scope | {"root_path": BASE}, receive, send)

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(mounted, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Site(f"http://reader:{KEY}@127.0.0.1:{listening.getsockname()[1]}{BASE}")
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listening.close()
    assert not thread.is_alive()


def text(browser: Any) -> str:
    return browser.find_element(By.TAG_NAME, "body").text


def wait_for(browser: Any, expected_text: str) -> None:
    # The page may be replaced while it is read: the driver has no class of its own for a body that is just gone.
    waiting = WebDriverWait(browser, WAIT_S, ignored_exceptions=[WebDriverException])
    waiting.until(lambda b: expected_text in text(b), f"the page never showed {expected_text!r}")


def press(browser: Any, action: str, key: str, reason: str, arm: str | None = None) -> None:
    """Fill the form and press an action's button."""
    browser.find_element(By.NAME, "reason").send_keys(reason)
    browser.find_element(By.NAME, "key").send_keys(key)
    of_arm = f'[value="{arm}"]' if arm else ""
    browser.find_element(By.CSS_SELECTOR, f'button[formaction$="/{action}"]{of_arm}').click()


def test_a_person_finds_an_experiment_and_sees_what_is_known(browser, site):
    look(browser)
    browser.get(f"{site.url}/ui")
    assert "gridworld" in text(browser)
    assert browser.find_element(By.CSS_SELECTOR, ".chip.running").text == "Running"
    keep(browser, "ui-list")
    browser.find_element(By.LINK_TEXT, "gridworld").click()
    wait_for(browser, "Audit log")
    for part in ("mappo", "p3o", "grpo-wide", "Roll back", "Promote", "cost", "no harm at 0.05 of the units"):
        assert part in text(browser)
    chart = browser.find_element(By.CSS_SELECTOR, "svg.chart.wide")
    assert chart.is_displayed()
    assert chart.size["width"] > 700
    assert not browser.find_element(By.CSS_SELECTOR, "svg.chart.narrow").is_displayed()
    lines = chart.find_elements(By.CSS_SELECTOR, "path.line")
    assert len(lines) == 3
    assert all(line.size["width"] > 500 for line in lines)
    assert len({line.value_of_css_property("stroke") for line in lines}) == 3
    refused = [
        entry["message"] for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]
    ]
    assert refused == []


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        ("light", 1280, False),
        ("dark", 1280, True),
        ("phone", 390, False),
        ("phone-dark", 390, True),
        ("tablet", 760, False),
        ("small", 920, False),
    ],
)
def test_nothing_is_cut_off_at_any_width_in_light_and_dark(browser, site, name, width, dark):
    look(browser, width, dark)
    browser.get(f"{site.url}/ui/experiments/gridworld")
    keep(browser, f"ui-{name}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    shade = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert (shade == "rgba(255, 255, 255, 1)") != dark
    shown = "narrow" if width < 600 else "wide"
    assert browser.find_element(By.CSS_SELECTOR, f"svg.chart.{shown}").is_displayed()


def test_a_rollback_by_the_form_is_done_and_told(browser, site):
    look(browser)
    browser.get(f"{site.url}/ui/experiments/gridworld")
    press(browser, "rollback", KEY, "costs <more> than it earns", arm="p3o")
    wait_for(browser, "Last change")
    wait_for(browser, "Rollback p3o by ada")
    assert "costs <more> than it earns" in text(browser)
    assert browser.find_element(By.CSS_SELECTOR, "tr.out").text.endswith("Rolled back")
    assert browser.current_url.endswith("/ui/experiments/gridworld")
    press(browser, "rollback", KEY, "none is left", arm="grpo-wide")
    wait_for(browser, "Rolled back")
    assert browser.find_element(By.CSS_SELECTOR, ".chip").text == "Rolled back"
    keep(browser, "ui-rolled-back")


def test_a_wrong_key_changes_nothing_and_keeps_the_reason(browser, site):
    look(browser)
    browser.get(f"{site.url}/ui/experiments/gridworld")
    press(browser, "pause", "wrong", "lunch")
    wait_for(browser, "admin key: expected the secret")
    keep(browser, "ui-wrong-key")
    assert browser.find_element(By.CSS_SELECTOR, ".chip").text == "Running"
    assert browser.find_element(By.NAME, "reason").get_attribute("value") == "lunch"
    assert browser.find_element(By.NAME, "key").get_attribute("value") == ""
    press(browser, "pause", KEY, " break")
    wait_for(browser, "Resume")
    assert browser.find_element(By.CSS_SELECTOR, ".chip").text == "Paused"
    assert "lunch break" in text(browser)


@pytest.mark.long
def test_a_change_decided_on_an_older_page_is_refused(browser, site):
    look(browser)
    browser.get(f"{site.url}/ui/experiments/gridworld")
    older = browser.current_window_handle
    browser.switch_to.new_window("tab")
    browser.get(f"{site.url}/ui/experiments/gridworld")
    press(browser, "pause", KEY, "first")
    wait_for(browser, "Resume")
    browser.close()
    browser.switch_to.window(older)
    press(browser, "next_stage", KEY, "second")
    wait_for(browser, "was decided on epoch 2")
    assert "Resume" in text(browser)


@pytest.mark.long
def test_neither_return_nor_a_missing_reason_changes_anything(browser, site):
    look(browser)
    browser.get(f"{site.url}/ui/experiments/gridworld")
    browser.find_element(By.NAME, "reason").send_keys("not yet")
    browser.find_element(By.NAME, "key").send_keys(KEY, Keys.RETURN)
    browser.find_element(By.NAME, "reason").clear()
    browser.find_element(By.CSS_SELECTOR, 'button[formaction$="/pause"]').click()
    browser.get(f"{site.url}/ui/experiments/gridworld")
    assert browser.find_element(By.CSS_SELECTOR, ".chip").text == "Running"
    assert "not yet" not in text(browser)


@pytest.mark.long
def test_a_draft_is_started_and_the_live_view_follows_by_itself(browser, site):
    look(browser)
    browser.get(f"{site.url}/ui/experiments/chess")
    assert "No outcomes yet." in text(browser)
    keep(browser, "ui-draft")
    press(browser, "start", KEY, "ready")
    wait_for(browser, "Running")
    browser.get(f"{site.url}/ui/experiments/gridworld/live")
    assert browser.find_elements(By.TAG_NAME, "form") == []
    keep(browser, "ui-live")
    before = browser.find_element(By.CSS_SELECTOR, ".clock time").text
    waiting = WebDriverWait(browser, WAIT_S, ignored_exceptions=[WebDriverException])
    waiting.until(
        lambda b: b.find_element(By.CSS_SELECTOR, ".clock time").text != before, "the live view never reloaded"
    )
