"""One process of vLLM for several decoders: each step writes the next tokens of all of them."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from marl_ray.policies.engines.base import EngineLostError, EngineRefusedError
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.messages import SampledToken, VllmRequest

TURN_S = 1200.0
"""Seconds that a thread waits for its turn, in which another thread may have to start a process."""


class FairLock:
    """A lock that threads get in the order in which they ask. Python's own lock may starve a thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @contextmanager
    def turn(self, limit_s: float = TURN_S) -> Iterator[None]:
        """Wait for the lock and hold it. Raises EngineLostError if no turn comes within `limit_s` seconds."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            if not self._changed.wait_for(lambda: self._queue[0] is ticket, limit_s):
                self._queue.remove(ticket)
                raise EngineLostError(f"generation.engine=vllm: other arms used its process for {limit_s:g} s")
        try:
            yield
        finally:
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()


class SharedProcess:
    """A process and its ports.

    The first decoder that needs tokens runs the step, which also yields tokens for the others.
    """

    def __init__(self, process: VllmProcess, lock: FairLock) -> None:
        self.process, self.lock = process, lock
        self._ports: dict[int, DecoderPort] = {}

    def port(self, version: int) -> "DecoderPort":
        """Return the port of one decoder. vLLM reports `version` with each of its tokens."""
        port = self._ports[version] = DecoderPort(self)
        return port

    def remove_port(self, version: int) -> None:
        """Forget a port. The caller holds the turn and ends the port's responses."""
        self._ports.pop(version, None)

    def step(self) -> None:
        """Sort the next tokens of all responses by port. The caller holds the turn. Raises EngineLostError."""
        tokens: dict[int, list[SampledToken]] = {}
        for token in self.demand("step"):
            tokens.setdefault(token.version, []).append(token)
        for version, part in tokens.items():
            if version not in self._ports:
                raise self._lose(f"generation.engine=vllm: it samples with version {version}, which no arm has")
            self._ports[version].arrived.append(part)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the server as `VllmProcess.ask` does, and raise its errors. The caller holds the turn."""
        return self.process.ask(method, *arguments)

    def demand(self, method: str, *arguments: object) -> Any:
        """Call a method that a sound engine never refuses; if it does, end the process.

        The caller holds the turn. Raises EngineLostError.
        """
        try:
            return self.ask(method, *arguments)
        except EngineRefusedError as error:
            raise self._lose(str(error)) from None

    def _lose(self, why: str) -> EngineLostError:
        self.process.close(why)
        return EngineLostError(why)


class DecoderPort:
    """One decoder's access to a process: the calls `add`, `step` and `remove`, for its own responses."""

    def __init__(self, shared: SharedProcess) -> None:
        self._shared = shared
        self.handles = shared.process.handles
        self.arrived: deque[list[SampledToken]] = deque()
        """Tokens that the decoder has not taken yet, one list for each step."""

    @property
    def lost(self) -> bool:
        """True once the process was ended."""
        return self._shared.process.lost

    def ask(self, method: str, *arguments: Any) -> Any:
        """Ask the process, as `VllmProcess.ask` does.

        If vLLM refuses `add`, only these responses end; if it refuses another call, the process ends. Raises
        EngineLostError if the process has ended.
        """
        if self.lost:  # without waiting for a turn, in which another process may start
            raise EngineLostError(self._shared.process.why_lost)
        with self._shared.lock.turn():
            match method:
                case "add":
                    return self._add(*arguments)
                case "remove":
                    return self._remove(*arguments)
                case _:
                    if not self.arrived:
                        self._shared.step()
                    return self.arrived.popleft() if self.arrived else []

    def _add(self, requests: Sequence[VllmRequest]) -> None:
        try:
            self._shared.ask("add", requests)
        except EngineRefusedError:
            self._shared.demand("remove", [request.handle for request in requests])
            raise

    def _remove(self, handles: Sequence[int]) -> None:
        removed = set(handles)
        remaining = ([token for token in part if token.handle not in removed] for part in self.arrived)
        self.arrived = deque(part for part in remaining if part)
        self._shared.demand("remove", handles)
