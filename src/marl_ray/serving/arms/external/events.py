"""Server-sent events of an OpenAI-compatible API, read byte by byte as the standard demands.

Only line feeds and carriage returns end lines: texts contain other line separators (U+2028), which JSON need not
escape. Events are always UTF-8, whatever the header says.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from marl_ray.serving.arms.errors import ArmError, new_pass_number

END_DATA = b"[DONE]"
MAX_RESPONSE_BYTES = 64_000_000
"""Maximum number of bytes of a response; one that never ends would fill the memory."""
MAX_LINE = 4_000_000
"""Maximum number of bytes of a line."""
CLOSING_S = 0.05
"""Seconds to wait for the end of the body after the last event, so that the connection can be used again."""
_BOM = b"\xef\xbb\xbf"


async def events_of(parts: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yield the data of each event up to the one that marks the end. Raises ArmError if the stream ends without it."""
    held, read, first = b"", 0, True
    async for part in parts:
        read += len(part)
        *lines, held = (held + part).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(held) > MAX_LINE or read > MAX_RESPONSE_BYTES:
            raise ArmError(
                f"its response is longer than {MAX_RESPONSE_BYTES} bytes, or a line of it than {MAX_LINE}",
                new_pass_number(),
            )
        for line in lines:
            line, first = line.removeprefix(_BOM) if first else line, False
            if line.startswith(b"data:"):
                if line[5:].strip() == END_DATA:
                    await _drain(parts)
                    return
                yield line[5:].decode("utf-8", "replace")
    if held.startswith(b"data:") and held[5:].strip() != END_DATA:  # the last line lacks its line break
        yield held[5:].decode("utf-8", "replace")


async def _drain(parts: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(CLOSING_S):
            async for _ in parts:
                pass
