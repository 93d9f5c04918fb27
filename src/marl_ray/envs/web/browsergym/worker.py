"""The program that plays BrowserGym's episodes for another process, which may run another Python.

    python worker.py CHROMIUM

It reads JSON lines from its standard input, and writes an answer to each one to its standard output; what libraries print
goes to the standard error. It imports the standard library and BrowserGym alone, and ends with its input.
"""

import fnmatch
import functools
import importlib
import json
import os
import queue
import sys
import threading
import time
from typing import Any, TextIO

PREFIX = "browsergym/"
GRACE_S = 10.0
"""Seconds that a call may continue for after the input has ended."""
FAMILIES = {
    "assistantbench": "browsergym-assistantbench",
    "miniwob": "browsergym-miniwob",
    "openended": "browsergym-core",
    "visualwebarena": "browsergym-visualwebarena",
    "webarena": "browsergym-webarena",
    "workarena": "browsergym-workarena",
}
"""Families of tasks, and the distributions that bring them."""
_ACTION_SUBSETS = "chat", "bid", "nav", "tab", "infeas"


def main() -> None:
    """Answer lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(sys.stdin, lines), daemon=True).start()
    player = GymPlayer(sys.argv[1])
    while line := lines.get():
        request = json.loads(line)
        try:
            answer = getattr(player, request.pop("call"))(**request)
        except Exception as error:  # whatever a page, a site or a package does is the answer
            text = str(error).strip() or "no message"
            answer = {"fault": f"{type(error).__name__}: {text.splitlines()[0]}"}
        answers.write(json.dumps(answer) + "\n")
    player.close()


def _read_lines(stream: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")
    time.sleep(GRACE_S)
    os._exit(1)  # Playwright's driver ends its browsers with this process


class GymPlayer:
    """The calls of the other process."""

    def __init__(self, chromium: str):
        """`chromium` is the path of the browser."""
        self.chromium = chromium
        self.env: Any = None
        self.task = ""

    def find(self, pattern: str) -> dict[str, object]:
        """Return the registered `ids` of the family of `pattern`, the `chosen` ones that match, and `actions`, a text.

        Returns the name of a `missing` module if the family's package is not installed.
        """
        package = _package(pattern)
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            return {"missing": error.name}
        import gymnasium

        ids = sorted(name for name in gymnasium.registry if name.startswith(PREFIX + family_of(pattern)))
        text = _action_set().describe(with_long_description=False, with_examples=False)
        return {"ids": ids, "chosen": fnmatch.filter(ids, pattern), "actions": text}

    def reset(self, task: str, seed: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode of a task and return its page as `step` does, with `goal`, the task in words."""
        if task != self.task:
            self.close()
            self.env, self.task = _make_env(task, self.chromium, kwargs), task
        observation, _ = self.env.reset(seed=seed)
        return {"goal": observation["goal"], **_read_page(observation)}

    def step(self, action: str) -> dict[str, Any]:
        """Do an action and return `page` and `url`, `error` of the action, `messages` of the chat, `reward` and `over`."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return {**_read_page(observation), "reward": float(reward), "over": bool(terminated or truncated)}

    def close(self) -> dict[str, Any]:
        """Close the browsers of the episode."""
        env, self.env, self.task = self.env, None, ""
        if env is not None:
            env.close()
        return {}


def family_of(task: str) -> str:
    """Return the family of an id, `browsergym/FAMILY.TASK`."""
    return task.removeprefix(PREFIX).partition(".")[0]


def _package(task: str) -> str:
    """Return the package that registers the tasks of an id's family."""
    return FAMILIES[family_of(task)].replace("-", ".")


def _action_set() -> Any:
    from browsergym.core.action.highlevel import HighLevelActionSet

    return HighLevelActionSet(subsets=list(_ACTION_SUBSETS), multiaction=False)


def _make_env(task: str, chromium: str, kwargs: dict[str, Any]) -> object:
    import gymnasium

    importlib.import_module(_package(task))
    _launch_with(chromium)
    return gymnasium.make(task, disable_env_checker=True, action_mapping=_action_set().to_python_code, **kwargs)


@functools.cache
def _launch_with(chromium: str) -> None:
    """Have Playwright start this Chromium also for BrowserGym's chat, whose browser takes no options from here."""
    from playwright.sync_api import BrowserType

    launch = BrowserType.launch

    def launch_chromium(self: Any, **options: Any) -> Any:
        flags = [*(options.pop("args", None) or ()), "--disable-dev-shm-usage", "--disable-gpu"]
        options = {"executable_path": chromium, "chromium_sandbox": os.geteuid() != 0, **options}
        return launch(self, args=flags, **options)

    BrowserType.launch = launch_chromium  # type: ignore[method-assign]


def _read_page(observation: dict[str, Any]) -> dict[str, object]:
    from browsergym.utils.obs import flatten_axtree_to_str

    titles = [str(title) for title in observation["open_pages_titles"]]
    current = int(observation["active_page_index"][0])
    tabs = " | ".join(f"Tab {k}{' (current)' if k == current else ''}: {title!r}" for k, title in enumerate(titles))
    text = flatten_axtree_to_str(observation["axtree_object"], ignored_roles=["InlineTextBox"])
    return {
        "page": f"{tabs}\n\n{text}",
        "url": str(observation["url"]),
        "error": str(observation["last_action_error"]).strip().partition("\n")[0],
        "messages": [str(message["message"]) for message in observation["chat_messages"] if message["role"] == "user"],
    }


if __name__ == "__main__":
    main()
