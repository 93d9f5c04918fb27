"""`marl-ray try`: a team is trained, scored, served and played, and Ctrl-C ends everything."""

import json
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from processes.command_line import PROGRAM, keys_of, marl_ray
from processes.environment import without_ray
from waiting import until

from marl_ray.first_steps.quickstart import has_display

READY_S = 240.0
"""Seconds on a busy machine; on two cores that do nothing else it is ready within a minute."""


def test_a_page_is_opened_only_where_it_is_seen(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert not has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_display()


def test_its_help_names_the_way_to_end_after_the_check():
    done = marl_ray("try", "--help")
    assert done.returncode == 0 and "--exit" in done.stdout and "--no-open" in done.stdout


@pytest.mark.slow
def test_a_team_is_trained_scored_served_and_gone_after_ctrl_c(tmp_path):
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [PROGRAM, "try", "--no-open", "--json", "--folder", str(tmp_path / "try")],
            env=without_ray(),
            stdout=out,
            stderr=err,
        )
    try:
        until(
            lambda: process.poll() is not None or "serving until Ctrl-C" in errors.read_text(),
            "`try` to serve",
            READY_S,
            errors.read_text,
        )
        printed = errors.read_text()
        assert process.poll() is None, printed
        tried = json.loads(output.read_text())
        assert set(tried) == keys_of("try") and "starting a local Ray" in printed
        page = httpx.get(f"{tried['url']}/ui", auth=("any", tried["key"]), timeout=60)
        assert page.status_code == 200 and "gridworld" in page.text
        assert tried["after"][0] > tried["before"][0] + 0.3
        assert Path(tried["bundle"], "bundle.json").exists()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not psutil.wait_procs(children, timeout=60)[1]
    finally:
        process.kill()
        process.wait(60)
