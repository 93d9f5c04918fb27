"""BrowserGym without BrowserGym: what is refused, and what happens to a process that does not answer."""

import importlib.util
import shutil
import time
from pathlib import Path

import psutil
import pytest
from waiting import until, until_ended

from marl_ray.config import EnvConfig
from marl_ray.envs.registry import make_env
from marl_ray.envs.web.browser.chromium import EXECUTABLE_VARIABLE
from marl_ray.envs.web.browser.errors import BrowserError, PageError
from marl_ray.envs.web.browsergym import process as process_module
from marl_ray.envs.web.browsergym.process import BrowserGymProcess
from marl_ray.errors import MarlRayError


@pytest.fixture(autouse=True)
def some_chromium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXECUTABLE_VARIABLE, str(shutil.which("true")))  # no browser is started


def program(folder: Path, lines: str) -> str:
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(importlib.util.find_spec("browsergym") is not None, reason="BrowserGym is installed")
def test_an_id_says_what_to_install():
    for env_id, hint in {
        "browsergym/miniwob.click-test": r"needs browsergym-miniwob, .* pip install .*\[browsergym\]'",
        "browsergym/webarena.310": r"needs browsergym-webarena, .* whose Python env\.kwargs\.python names",
    }.items():
        with pytest.raises(MarlRayError, match=rf"env\.id: '{env_id}' {hint}") as raised:
            make_env(EnvConfig(id=env_id))
        assert "\n" not in str(raised.value)


def test_what_is_wrong_is_one_line(tmp_path):
    for env_id, kwargs, message in (
        ("browsergym/minwob.click-test", {}, "of no family of BrowserGym; did you mean miniwob"),
        ("browsergym/miniwob.click-test", {"python": "/no/python"}, "python='/no/python' is no program"),
        ("browsergym/miniwob.click-test", {"python": program(tmp_path, "exit 3")}, "BrowserGym's process has ended"),
        ("browsergym/miniwob.click-test", {"max_steps": 0}, "max_steps=0, expected more than 0"),
    ):
        with pytest.raises(MarlRayError, match=message):
            make_env(EnvConfig(id=env_id, kwargs=kwargs))


def test_a_process_that_does_not_answer_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "CLOSE_S", 0.2)
    process = BrowserGymProcess(program(tmp_path, "sleep 300 & sleep 300"))
    begun = time.monotonic()
    worker = psutil.Process(process.pid)
    until(lambda: len(worker.children(recursive=True)) == 2, "the processes that it starts")
    started = [worker, *worker.children(recursive=True)]
    with pytest.raises(PageError, match=r"^BrowserGym's reset took longer than 0\.2 s$"):
        process.call("reset", 0.2)
    assert time.monotonic() - begun < 120, "its processes were waited for"
    until_ended(started)


def test_an_error_of_a_call_is_a_fault_and_ends_the_process():
    process = BrowserGymProcess(None)
    with pytest.raises(
        BrowserError, match=r"^BrowserGym's step failed: AttributeError: 'NoneType' object has no attribute 'step'$"
    ):
        process.call("step", 30.0, action="noop()")
    with pytest.raises(PageError, match=r"^BrowserGym's process has ended$"):
        process.call("step", 30.0, action="noop()")
