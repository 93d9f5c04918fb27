"""The recording of an episode: its steps, pictures, page and trace."""

import json
import re
import zipfile

import pytest
from servers.little_site_tasks import make_browser_env, play
from servers.playwright_chromium import no_chromium_stays

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def test_an_episode_is_recorded(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/", record=str(tmp_path / "record"), traces=True)
    play(env, "click [{Chair}]", "fly", "stop [done]")
    (folder,) = (tmp_path / "record").iterdir()
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["ending"] for step in steps] == ["", "", "stopped"]
    assert [bool(step["note"]) for step in steps] == [False, True, False]
    assert steps[-1]["score"] == 1.0
    assert steps[0]["url"] == f"{site.url}/chair"
    for k in range(3):
        assert (folder / f"{k:03d}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "episode.html").read_text()
    assert "<h1>Do it.</h1>" in page and "score 1" in page
    assert re.search(r"1\. click \[\d+\] link &#x27;Chair&#x27;", page)
    pictures = re.findall(r'<img src="(.+?)"', page)
    assert pictures == ["start.png", "000.png", "001.png", "002.png"]
    assert all((folder / name).exists() for name in pictures)
    assert zipfile.ZipFile(folder / "trace.zip").testzip() is None
