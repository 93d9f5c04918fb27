"""The parent's side of vLLM's process, which it starts and calls with a deadline on every wait."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from multiprocessing.connection import Connection
from typing import Any

from marl_ray.policies.engines.base import EngineLostError, EngineRefusedError
from marl_ray.policies.engines.vllm.process.messages import VllmSettings
from marl_ray.temporary_folders import new_temporary_folder

START_S = 600.0
"""Seconds that vLLM may take to build its model."""
ANSWER_S = 300.0
"""Seconds that any other answer may take, such as a step or the loading of weights. The first steps compile kernels."""
CLOSE_S = 10.0
"""Seconds that a killed process may take to end; then it is left to the kernel."""
SERVER_MODULE = "marl_ray.policies.engines.vllm.process.server"


class VllmProcess:
    """One process of vLLM, which exchanges pickles with its parent over a socket that no other process can reach."""

    def __init__(self, settings: VllmSettings, threads: int) -> None:
        """Start vLLM with `threads` threads on a CPU. Raises EngineRefusedError or EngineLostError if it cannot start."""
        own_end, other_end = socket.socketpair()
        # A process that has stopped reads nothing: what the socket has no room for would wait for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            own_end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *_timeval(ANSWER_S)))
        # vLLM leaves files in the temporary folder, so the process gets one of its own, which is removed with it.
        folder = str(new_temporary_folder("vllm"))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER_MODULE, str(other_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=os.environ | _environment(settings, threads) | {"TMPDIR": folder},
                pass_fds=[other_end.fileno()],
                start_new_session=True,  # only the parent reacts to Ctrl-C in the terminal
            )
        self._connection = Connection(own_end.detach())
        self.handles = itertools.count()
        """Numbers of the responses, each used once."""
        self.why_lost = "generation.engine=vllm: its process was ended"
        """The error of all calls once the process is lost."""
        self._end = weakref.finalize(self, _end, self._process, self._connection, folder)
        self.ask("start", settings, deadline_s=START_S)

    @property
    def lost(self) -> bool:
        """True once the process was ended by this object, or because it did not answer."""
        return not self._end.alive

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def ask(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Call a method of the server, and wait at most `deadline_s` seconds for the answer, else ANSWER_S.

        Raises EngineRefusedError for an error of the method. Raises EngineLostError if no answer comes or the process
        dies: the process is then killed, and all later calls raise the same at once.
        """
        if self.lost:
            raise EngineLostError(self.why_lost)
        limit = ANSWER_S if deadline_s is None else deadline_s
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(limit):
                raise BlockingIOError
            good, value = self._connection.recv()
        except BlockingIOError:
            self.close(f"generation.engine=vllm: no answer to `{method}` in {limit:g} s")
            raise EngineLostError(self.why_lost) from None
        except (OSError, EOFError):
            if not self.lost:  # else another thread has ended it, and said why
                self.close()
                self.why_lost = f"generation.engine=vllm: its process died in `{method}`: {self._last_words()}"
            raise EngineLostError(self.why_lost) from None
        if not good:
            raise EngineRefusedError(f"generation.engine=vllm: {value}")
        return value

    def close(self, why: str | None = None) -> None:
        """End the process; a second call does nothing. `why` is the error of later calls, where there is one."""
        if not self.lost and why is not None:
            self.why_lost = why
        self._end()

    def _last_words(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), 1 << 14, max(0, size - (1 << 14))).decode("utf-8", "replace").strip()
        code = self._process.returncode
        return f"status {code}" + (f", {text.splitlines()[-1]}" if text else "")


def _timeval(seconds: float) -> tuple[int, int]:
    """Return whole seconds, and the rest in microseconds."""
    return int(seconds), int(1e6 * (seconds % 1))


def _end(process: "subprocess.Popen[bytes]", connection: Connection, folder: str) -> None:
    with contextlib.suppress(OSError):
        connection.close()  # the process ends when it reads the end of the connection
    # The step under way is not needed any more; the session also contains the workers of a tensor-parallel engine.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A call of the kernel that hangs, such as a driver's, also delays SIGKILL: the caller is told of the lost engine.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_S)
    shutil.rmtree(folder, ignore_errors=True)


def _environment(settings: VllmSettings, threads: int) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
