"""The check of the demo's output: what the demo printed tells the whole story, in its order."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "demo_story.py"))["main"]
STORY = """experiment gridworld: promoted
│ ippo   │ 0.953
│ mappo  │ 0.961
promote mappo  by gateway: the promotion bound holds
experiment gridworld-2: rolled_back
│ candidate │ 0.12 │ worse │
rollback candidate  by gateway: harm proven by outcome
"""


@pytest.fixture
def find_mistake(tmp_path):
    """Return a function that returns the mistake of a demo that printed a text, with names in the demo's folder."""

    def find(text, drawing_bytes=10_000):
        drawing, output = tmp_path / "return.png", tmp_path / "demo.log"
        drawing.write_bytes(bytes(drawing_bytes))
        output.write_text(text.replace("return.png", str(drawing)), encoding="utf-8")
        return main(str(output)).replace(f"{tmp_path}{os.sep}", "")

    return find


def test_a_whole_story_has_no_mistake(find_mistake):
    assert find_mistake(f"{STORY}curves  return.png\n") == ""


def test_the_first_event_that_is_missing_or_comes_too_early_is_named(find_mistake):
    first, *others = STORY.splitlines(keepends=True)
    message = r"demo.log: expected 'experiment gridworld: promoted'"
    assert find_mistake(f"{''.join(others)}curves  return.png\n") == message
    message = r"demo.log: expected '│ ippo +│ +0\\.9\\d\\d'"
    assert find_mistake(f"{''.join(others)}{first}curves  return.png\n") == message


def test_a_drawing_that_is_not_named_missing_or_too_small_is_a_mistake(find_mistake, tmp_path):
    assert find_mistake(STORY) == "demo.log: expected a line 'curves FILE'"
    message = "return.png: expected a drawing of the learning curves"
    assert find_mistake(f"{STORY}curves  return.png\n", drawing_bytes=9_999) == message
    assert find_mistake(f"{STORY}curves  {tmp_path}/no.png\n") == "no.png: expected a drawing of the learning curves"


def test_a_process_of_the_demo_that_still_runs_is_a_mistake(find_mistake, tmp_path):
    command = [sys.executable, "-c", "input()", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            expected = f"processes [{process.pid}] of the demo are still running"
            assert find_mistake(f"{STORY}curves  return.png\n") == expected
        finally:
            process.kill()
