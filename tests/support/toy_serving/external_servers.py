"""The other side of an external arm: its key, its price, and servers that answer as a test wants."""

import asyncio
import json

from marl_ray.serving.http.messages import Receive, Scope, Send

KEY = "game"


PRICE = {"prompt": 100.0, "completion": 1000.0}


def external(url: str, **more: object) -> dict[str, object]:
    return {"url": url, "model": "exp", "api_key_env": "THEIR_KEY"} | more


class Replies:
    """An ASGI application that answers as it is told."""

    def __init__(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), hangs: bool = False):
        self.status, self.body, self.headers, self.hangs = status, body, headers, hangs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.hangs:
            await asyncio.sleep(60)
        await send({"type": "http.response.start", "status": self.status, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})


def chunk(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {}} | choice]}).encode() + b"\n\n"
