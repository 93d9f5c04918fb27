"""Environments of a process share one Chromium, which ends with them, and each keeps the rules of PettingZoo."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from pettingzoo.test import seed_test
from servers.little_site import web_record
from servers.little_site_tasks import content, make_browser_env, play
from servers.playwright_chromium import AGENT, no_chromium_stays
from waiting import until_ended

from marl_ray.config import EnvConfig
from marl_ray.envs.registry import is_text, make_env
from marl_ray.envs.web.browser.chromium import shared_chromium
from marl_ray.envs.web.webarena.environment import WebArena
from marl_ray.errors import MarlRayError

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def test_episodes_at_the_same_time_share_a_chromium_and_nothing_else(tmp_path, site):
    texts = ["one", "two", "three"]
    envs = []
    for text in texts:
        folder = tmp_path / text
        folder.mkdir()
        check = [content("last", "document.querySelector('ul').outerText", exact_match=text)]
        envs.append(make_browser_env(folder, site, "/notes", ["program_html"], program_html=check))
    threads = [
        threading.Thread(target=play, args=(env, f"type [{{Note}}] [{text}] [1]", "stop"), daemon=True)
        for env, text in zip(envs, texts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [env.infos[AGENT]["solved"] for env in envs] == [True] * 3
    assert shared_chromium(envs[0]).browser.contexts == []
    gc.collect()  # environments of other tests, which none has closed
    for env in envs:
        assert shared_chromium(env).connected
        env.close()
    assert not any("chrom" in process.name() for process in psutil.Process().children(recursive=True))


def test_the_registry_makes_it_and_it_keeps_pettingzoos_rules(tmp_path, site):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([web_record("/", ["string_match"], reference_answers={"exact_match": "done"})]))
    kwargs = {"data": str(path), "sites": {"shopping": site.url}, "held_out": 0.0}
    env = make_env(EnvConfig(id="webarena", kwargs=kwargs))
    assert is_text(env)
    env.close()
    seed_test(lambda: WebArena(**kwargs), num_cycles=8)
    with pytest.raises(MarlRayError, match="sites: no task needs only gitlab"):
        make_env(EnvConfig(id="webarena", kwargs=kwargs | {"sites": {"gitlab": site.url}}))
    with pytest.raises(MarlRayError, match=r"env.kwargs: webarena rejected .*max_steps=0, expected more than 0"):
        make_env(EnvConfig(id="webarena", kwargs=kwargs | {"max_steps": 0}))


@pytest.mark.parametrize("killed", ["alone", "with its children"])
def test_a_killed_process_leaves_no_browser_and_no_profile(killed):
    code = (
        "from marl_ray.envs.web.webarena.environment import WebArena as W; "
        "e = W(); e.reset(); print('ready', flush=True); input()"
    )
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        owner = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert owner.stdout is not None and owner.stdin is not None
        assert owner.stdout.readline() == b"ready\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        assert any("chrom" in process.name() for process in started)
        for process in [psutil.Process(owner.pid), *(started if killed != "alone" else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        owner.communicate(timeout=60)
        until_ended(started)
        code = "from marl_ray.temporary_folders import object_folder as make; make('web').cleanup()"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
        assert list(Path(folder).iterdir()) == []
