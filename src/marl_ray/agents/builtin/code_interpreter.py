"""The tool `code_interpreter`: programs of agents in the sandbox."""

import time
from dataclasses import replace

from marl_ray.agents.errors import ToolTimeoutError
from marl_ray.agents.tools import truncate_middle
from marl_ray.deadlines.seconds import check_seconds
from marl_ray.sandbox import Limits, Status
from marl_ray.sandbox.client.shared_pool import shared_pool
from marl_ray.sandbox.limits import check_memory


class CodeInterpreter:
    """Runs a Python program and returns what it prints."""

    name = "code_interpreter"
    bounded = True

    def __init__(self, timeout_s: float = 3.0, memory_bytes: int = 1 << 28, output_characters: int = 1000):
        """Raise ValueError naming the limit that is out of its range.

        timeout_s: CPU seconds of a program, 3; less than a day. On the clock it has four times as many, and no more than are
            left to the call.
        memory_bytes: memory of a program, 256 MiB; from 64 MiB to 256 TiB.
        output_characters: characters of its output that an agent reads, 1000; at least 1.
        """
        check_seconds("timeout_s", timeout_s)
        check_memory("memory_bytes", memory_bytes)
        if not (isinstance(output_characters, int) and output_characters > 0):
            raise ValueError(f"output_characters={output_characters!r}, expected a whole number, more than 0")
        self.timeout_s, self.memory_bytes, self.output_characters = timeout_s, memory_bytes, output_characters

    def prepare(self) -> None:
        """Start the sandbox, or raise MarlRayError where this machine cannot."""
        shared_pool()

    def __call__(self, code: str, deadline: float) -> str:
        """Return the output and error of the program. Each program runs by itself and keeps nothing.

        `deadline` is a time of `time.monotonic`. Raises ToolTimeoutError if the program is not over then.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ToolTimeoutError
        limits = Limits(cpu_s=self.timeout_s, memory_bytes=self.memory_bytes)
        wall_s = min(limits.max_wall_s, left_s)
        result = shared_pool().run(code, limits=replace(limits, wall_s=wall_s))
        printed = truncate_middle(
            (result.stdout + result.stderr).decode("utf-8", "replace").strip(), self.output_characters
        )
        if result.status is Status.TIMEOUT:
            waited = result.wall_s >= wall_s
            if waited and wall_s == left_s:
                raise ToolTimeoutError
            return f"{printed}\nTimed out after {wall_s if waited else self.timeout_s:g} s.".strip()
        if result.status not in (Status.OK, Status.EXIT):
            return f"{printed}\nEnded by the limits of the sandbox: {result.status}.".strip()
        return printed or "(no output)"
