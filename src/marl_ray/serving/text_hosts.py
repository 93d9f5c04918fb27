"""Large language models: each arm in a Serve application of its own, which streams through a handle."""

from collections.abc import AsyncIterator
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from marl_ray.policies.token_bundle import TokenBundle
from marl_ray.serving.deadlines import Deadlines
from marl_ray.serving.hosts import verified
from marl_ray.serving.text_arms import TextBatcher
from marl_ray.serving.texts import Piece, Refusal, TextRequest


class TextHost:
    """One replica of one arm. It computes with as many threads as Ray gives it CPUs."""

    def __init__(self, reference: str, digest: str, tracking_uri: str | None, max_batch: int, deadline_s: float):
        bundle = verified(reference, digest, tracking_uri)
        assert isinstance(bundle, TokenBundle)
        self._batcher = TextBatcher(bundle, max_batch, deadline_s)

    async def write(self, request: TextRequest) -> AsyncIterator[Piece | Refusal]:
        """All pieces; the response is given up when the call is cancelled."""
        reply = self._batcher.write(request)
        try:
            while True:
                piece = await reply.next()
                yield piece
                if isinstance(piece, Refusal) or piece.finish is not None:
                    return
        finally:
            reply.leave()


class RemoteTextArm:
    """An arm behind a handle."""

    def __init__(self, bundle: TokenBundle, handle: DeploymentHandle, deadline_s: float):
        """`deadline_s` is the host's own for a token; a host that says nothing at all gets half of it more."""
        self.bundle = bundle
        self._write: Any = handle.options(
            method_name="write", stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        self._deadlines, self._deadline_s = Deadlines(), 1.5 * deadline_s

    def write(self, request: TextRequest) -> "_RemoteReply":
        return _RemoteReply(self._write.remote(request), self._deadlines, self._deadline_s)

    def close(self) -> None:
        """Nothing is held here."""


class _RemoteReply:
    """A response that another process writes, a `Reply`."""

    def __init__(self, pieces: DeploymentResponseGenerator[Any], deadlines: Deadlines, deadline_s: float):
        self._pieces, self._deadlines, self._deadline_s = pieces, deadlines, deadline_s

    async def next(self) -> Piece | Refusal:
        """As of `Reply`; TimeoutError after the deadline."""
        piece: Piece | Refusal = await self._deadlines.run(anext(self._pieces), self._deadline_s)
        return piece

    def leave(self) -> None:
        self._pieces.cancel()
