"""vLLM in serving: policies that are adapters of one base model share a process.

The process loads the base once and the adapters beside it, and a step writes the next tokens of all of them.
"""

import contextlib
import itertools
import shutil
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.config.run.engines import VLLM_MAX_RANK
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import EngineLostError, Prompt
from marl_ray.policies.engines.serving import ServedEngine
from marl_ray.policies.engines.vllm.engine import VllmEngine
from marl_ray.policies.engines.vllm.process.child import CLOSE_S, VllmProcess
from marl_ray.policies.engines.vllm.process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm.process.decoder_ports import DecoderPort, FairLock, SharedProcess
from marl_ray.policies.engines.vllm.process.messages import AdapterRoom
from marl_ray.policies.language.base_model import share_base
from marl_ray.policies.language.lora import save_adapters
from marl_ray.temporary_folders import object_folder

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

MAX_RANK = 32
"""Maximum rank that a process accepts, unless the rank of its first adapter is greater."""
MAX_ADAPTERS = 8
"""Maximum number of adapters whose responses may share a step; others wait for a later step."""
WARM_UP = GenerationConfig(max_tokens=2)


class SharedVllm(ServedEngine):
    """vLLM for one policy, whose weights never change.

    Only one thread at a time may use it, but any may call `close`.
    """

    loads_adapters = True

    def __init__(self, policy: "TokenPolicy") -> None:
        """Start a process, or join the one that has the policy's base model; ready when this returns.

        Raises MarlRayError if the package is missing, the architecture is not verified for vLLM, the process cannot
        start, or the process cannot take the adapter, because its rank is too great or its base model is another one.
        """
        self._policy = policy
        self.base, self._number = join_base(policy)
        self._leave = weakref.finalize(self, self.base.leave, self._number)
        self._port: DecoderPort | None = None
        self._decoder: VllmDecoder | None = None
        try:
            self.base.add(self._number, policy)
            decoder = self.decoder()  # the first steps compile kernels, and no client should wait for that
            decoder.add([Prompt((0,), 0)], 0, WARM_UP)
            while len(decoder):
                decoder.step()
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> VllmProcess | None:
        """The process, or None before it has started."""
        return self.base.engine.process

    def decoder(self) -> VllmDecoder:
        """Return the decoder of the unfinished responses.

        If it has none and its process is lost, a new one replaces it.
        """
        if self._decoder is None or (not len(self._decoder) and self._port is not None and self._port.lost):
            version, self._port = self.base.port(self._number)
            policy, adapter = self._policy, self._number if self.base.adapted else 0
            self._decoder = VllmDecoder(self._port, policy.tokenizer, policy.end_tokens, version, adapter)
        return self._decoder

    def abandon(self) -> None:
        """End all responses of this policy. Those of other policies continue."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            with contextlib.suppress(EngineLostError):
                decoder.clear()

    def close(self) -> None:
        """Leave the process, which ends with its last policy; a second call does nothing."""
        with _joining:
            self._leave()
            if self.base.empty:
                self.base.engine.close()
        self.base.drop_left()


class SharedBase:
    """A base model in a process of vLLM, with adapters beside it; or a single policy without an adapter.

    Raises MarlRayError for an adapter whose rank is greater than vLLM's greatest.
    """

    def __init__(self, policy: "TokenPolicy") -> None:
        lora = policy.config.lora
        if lora is not None and lora.rank > VLLM_MAX_RANK:
            raise MarlRayError(
                f"engine=vllm: the adapter of {policy.config.path!r} has rank {lora.rank}, expected at most "
                f"{VLLM_MAX_RANK}, the greatest rank of vLLM"
            )
        self.policy, self.adapted = policy, lora is not None
        self._room = AdapterRoom(max(MAX_RANK, lora.rank), MAX_ADAPTERS) if lora is not None else None
        # The log-probabilities of a stream cannot be computed again after its last token.
        self.engine = VllmEngine(policy, processed=True, room=self._room)
        self._lock = FairLock()
        self._shared: SharedProcess | None = None
        self._numbers = itertools.count(1)
        self._members: set[int] = set()
        self._folders: dict[int, Path] = {}
        """Number -> folder of an adapter that the process has loaded."""
        self._folder = object_folder("adapters")

    @property
    def empty(self) -> bool:
        """True if no policy uses the process any more."""
        return not self._members

    def join(self) -> int:
        """Add a member and return its number, which is never used again."""
        number = next(self._numbers)
        self._members.add(number)
        return number

    def leave(self, number: int) -> None:
        """Remove a member; `drop_left`, or the next turn, drops its adapter.

        This never waits, because the garbage collector may call it at any moment.
        """
        self._members.discard(number)

    def add(self, number: int, policy: "TokenPolicy") -> None:
        """Load a member's adapter. Raises MarlRayError if its rank is too great, or if vLLM refuses it."""
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

    def port(self, number: int) -> tuple[int, DecoderPort]:
        """Return the version with which a member's tokens are written, and the port for them.

        Starts a process if there is none.
        """
        with self._lock.turn():
            shared = self._running()
            version = number if self.adapted else self.engine.version
            return version, shared.port(version)

    def drop_left(self) -> None:
        """Drop the adapters of members that have left, and end their responses.

        If no turn comes soon, the next turn does it.
        """
        with contextlib.suppress(EngineLostError), self._lock.turn(CLOSE_S):
            if self._shared is not None and not self._shared.process.lost:
                self._drop(self._shared)

    def _running(self) -> SharedProcess:
        """Return the process, with the base and all adapters loaded. The caller holds the turn."""
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


_bases: "weakref.WeakValueDictionary[tuple[str, int], SharedBase]" = weakref.WeakValueDictionary()
"""(Digest of the base model, context) -> the base."""
_joining = threading.Lock()


def join_base(policy: "TokenPolicy") -> tuple[SharedBase, int]:
    """Return the base of a policy, and the policy's number there.

    Raises MarlRayError if the policy is not of the base model that it names.
    """
    with _joining:
        key = policy.base_sha256, policy.config.context
        base = None if key[0] is None else _bases.get((key[0], key[1]))
        if base is None:
            base = SharedBase(policy)
            if key[0] is not None:
                _bases[key[0], key[1]] = base
        elif base.policy is not policy:
            try:
                share_base(policy.lm, base.policy.lm)
            except MarlRayError as error:
                where = f"engine=vllm: the adapter of {policy.config.path!r}"
                raise MarlRayError(f"{where} is not of the base model that it names: {error}") from error
        return base, base.join()
