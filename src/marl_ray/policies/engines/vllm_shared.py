"""vLLM in serving: policies that are adapters of one base model share a process.

The base is loaded once, the adapters stand beside it, and a step writes the next tokens of all of them.
"""

import contextlib
import itertools
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.vllm_engine import VllmEngine
from marl_ray.policies.engines.vllm_process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm_process.messages import AdapterRoom
from marl_ray.policies.engines.vllm_process.process import CLOSE_S, EngineLost, VllmProcess
from marl_ray.policies.engines.vllm_process.shared_process import FairLock, Port, SharedProcess
from marl_ray.policies.language.base_model import share_base
from marl_ray.policies.language.lora import save_adapters

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

RANK = 32
"""A process of adapters has room for this rank, or for that of its first adapter if it is greater."""
ADAPTERS = 8
"""Adapters whose responses are in a step together; others wait for a step without one of these."""
WARM_UP = GenerationConfig(max_tokens=2)


class SharedVllm:
    """vLLM for one policy, whose weights stay as they are. One thread at a time uses it, but for `close`."""

    def __init__(self, policy: "TokenPolicy") -> None:
        """Start a process, or join the one that has the policy's base model; ready when this returns.

        Raises MarlRayError without the package, for an architecture that it is not trusted with, where the process cannot
        start, and for an adapter that it cannot take: of a greater rank than it has room for, or of another base model.
        """
        self._policy = policy
        self._base, self._number = _join(policy)
        self._leave = weakref.finalize(self, self._base.leave, self._number)
        self._port: Port | None = None
        self._decoder: VllmDecoder | None = None
        try:
            self._base.add(self._number, policy)
            decoder = self.decoder()  # its first steps compile kernels, which no client shall wait for
            decoder.add([Prompt((0,), 0)], 0, WARM_UP)
            while len(decoder):
                decoder.step()
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> VllmProcess | None:
        """The process, once there is one."""
        return self._base.engine.process

    def decoder(self) -> VllmDecoder:
        """The decoder of the responses in the making. One without any, whose process is lost, is replaced."""
        if self._decoder is None or (not len(self._decoder) and self._port is not None and self._port.lost):
            version, self._port = self._base.port(self._number)
            policy, adapter = self._policy, self._number if self._base.adapted else 0
            self._decoder = VllmDecoder(self._port, policy.tokenizer, policy.end_tokens, version, adapter)
        return self._decoder

    def abandon(self) -> None:
        """Give all responses up. Those of other policies go on."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            with contextlib.suppress(EngineLost):
                decoder.clear()

    def close(self) -> None:
        """Leave the process, which ends with its last policy; twice does nothing."""
        with _joining:
            self._leave()
            if self._base.empty:
                self._base.engine.close()
        self._base.drop_left()


class _Base:
    """A base model in a process of vLLM, and the adapters beside it; or a policy without an adapter, alone."""

    def __init__(self, policy: "TokenPolicy") -> None:
        lora = policy.config.lora
        self.policy, self.adapted = policy, lora is not None
        self._room = AdapterRoom(max(RANK, lora.rank), ADAPTERS) if lora is not None else None
        # Log-probabilities of a stream cannot be computed again when its last token is there.
        self.engine = VllmEngine(policy, processed=True, room=self._room)
        self._lock = FairLock()
        self._shared: SharedProcess | None = None
        self._numbers = itertools.count(1)
        self._members: set[int] = set()
        self._folders: dict[int, Path] = {}
        """Number -> folder of an adapter that the process has."""
        self._folder = tempfile.TemporaryDirectory(prefix="marl-ray-adapters-")

    @property
    def empty(self) -> bool:
        return not self._members

    def join(self) -> int:
        """The number of a new member, never used before."""
        number = next(self._numbers)
        self._members.add(number)
        return number

    def leave(self, number: int) -> None:
        """Take a member out; `drop_left`, or the next turn, drops its adapter. The garbage collector may call this amid
        anything, so it waits for nothing."""
        self._members.discard(number)

    def add(self, number: int, policy: "TokenPolicy") -> None:
        """Load a member's adapter. Raises MarlRayError if its rank is too great, or if vLLM does not take it."""
        lora = policy.config.lora
        if lora is None or self._room is None:
            return
        if lora.rank > self._room.rank:
            raise MarlRayError(
                f"engine=vllm: the adapter of {policy.config.path!r} has rank {lora.rank}, expected at most "
                f"{self._room.rank}, for which the process of its base model has room"
            )
        folder = Path(self._folder.name) / str(number)
        save_adapters(policy.lm, lora, None, folder)
        with self._lock.turn():
            self._running().ask("load_adapter", number, str(folder))
            self._folders[number] = folder

    def port(self, number: int) -> tuple[int, Port]:
        """The version that writes a member's tokens, and the port for them. Starts a process if there is none."""
        with self._lock.turn():
            shared = self._running()
            version = number if self.adapted else self.engine.version
            return version, shared.port(version)

    def drop_left(self) -> None:
        """Drop the adapters of members that have left, and what they write. Leaves it to the next turn if that is long
        in coming."""
        with contextlib.suppress(EngineLost), self._lock.turn(CLOSE_S):
            if self._shared is not None and not self._shared.process.lost:
                self._drop(self._shared)

    def _running(self) -> SharedProcess:
        """The process, with the base and all adapters; in a turn."""
        process = self.engine.follow()
        if self._shared is None or self._shared.process is not process:
            shared = SharedProcess(process, self._lock)
            for number, folder in self._folders.items():
                shared.demand("load_adapter", number, str(folder))
            self._shared = shared
        self._drop(self._shared)
        return self._shared

    def _drop(self, shared: SharedProcess) -> None:
        for number in self._folders.keys() - self._members:
            shared.remove_port(number)
            shared.demand("drop_adapter", number)
            shutil.rmtree(self._folders.pop(number), ignore_errors=True)


_bases: "weakref.WeakValueDictionary[tuple[str, int], _Base]" = weakref.WeakValueDictionary()
"""By the digest of the base model and by context."""
_joining = threading.Lock()


def _join(policy: "TokenPolicy") -> tuple[_Base, int]:
    """The base of a policy, and the policy's number there."""
    with _joining:
        key = policy.base_sha256, policy.config.context
        base = None if key[0] is None else _bases.get((key[0], key[1]))
        if base is None:
            base = _Base(policy)
            if key[0] is not None:
                _bases[key[0], key[1]] = base
        elif base.policy is not policy:
            try:
                share_base(policy.lm, base.policy.lm)
            except MarlRayError as error:
                where = f"engine=vllm: the adapter of {policy.config.path!r}"
                raise MarlRayError(f"{where} is not of the base model that it names: {error}") from error
        return base, base.join()
