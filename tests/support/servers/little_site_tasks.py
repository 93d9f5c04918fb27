"""Web tasks on the little site, and episodes of them in a real Chromium."""

import json
import re
from pathlib import Path
from typing import Any

from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.envs.web.webarena.environment import WebArena
from servers.little_site import LittleSite, web_record
from servers.playwright_chromium import AGENT


def make_browser_env(
    folder: Path, site: LittleSite, start: str, types: list[str] | None = None, **rest: Any
) -> WebArena:
    """The environment with one task, whose checks and options are in `rest`."""
    checks = {key: rest.pop(key) for key in ("reference_answers", "reference_url", "program_html") if key in rest}
    if not checks:
        checks = {"reference_answers": {"exact_match": "done"}}
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps([web_record(start, types or ["string_match"], **checks)]))
    rest.setdefault("sites", {"shopping": site.url})
    return WebArena(str(path), held_out=0.0, **{"step_s": 10.0, **rest})


def play(env: BrowserEnv, *actions: str) -> dict[str, Any]:
    """The infos after these actions; in each `{NAME}` is the number of the element of that name."""
    env.reset(seed=0)
    for action in actions:
        assert not any(env.terminations.values()), env.infos
        env.step(re.sub(r"\{(.+?)\}", lambda match: str(number(env, match[1])), action))
    return dict(env.infos[AGENT])


def number(env: BrowserEnv, name: str) -> int:
    """The number of the element that is no text and has this name."""
    lines = [line for line in env.observe(AGENT).splitlines() if f" '{name}'" in line and "StaticText" not in line]
    match = re.match(r"\s*\[(\d+)\]", lines[0]) if lines else None
    assert match, f"no {name!r} in {env.observe(AGENT)}"
    return int(match[1])


def content(url: str, locator: str, **required: Any) -> dict[str, Any]:
    return {"url": url, "locator": locator, "required_contents": required}
