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
"""Data of the event that ends a stream of OpenAI's API."""
MAX_RESPONSE_BYTES = 64_000_000
"""Maximum number of bytes of a response; one that never ends would fill the memory."""
MAX_LINE_BYTES = 4_000_000
"""Maximum number of bytes of a line, far above a chunk with 20 likely tokens, so that no server fills the memory."""
CLOSING_S = 0.05
"""Seconds to wait for the end of the body after the last event, so that the connection can be used again."""
_BOM = b"\xef\xbb\xbf"


async def events_of(parts: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yield the data of each event up to the one that marks the end, or up to the end of the stream.

    Raises ArmError if the response, or a line of it, is too long.
    """
    incomplete_line = b""
    bytes_read = 0
    is_first_line = True
    async for part in parts:
        bytes_read += len(part)
        *lines, incomplete_line = (incomplete_line + part).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(incomplete_line) > MAX_LINE_BYTES or bytes_read > MAX_RESPONSE_BYTES:
            raise ArmError(
                f"its response is longer than {MAX_RESPONSE_BYTES} bytes, or a line of it than {MAX_LINE_BYTES}",
                new_pass_number(),
            )
        for line in lines:
            line = line.removeprefix(_BOM) if is_first_line else line
            is_first_line = False
            if line.startswith(b"data:"):
                if line[5:].strip() == END_DATA:
                    await _drain(parts)
                    return
                yield line[5:].decode("utf-8", "replace")
    if (
        incomplete_line.startswith(b"data:") and incomplete_line[5:].strip() != END_DATA
    ):  # the last line lacks its line break
        yield incomplete_line[5:].decode("utf-8", "replace")


async def _drain(parts: AsyncIterator[bytes]) -> None:
    """Read the body to its end, for CLOSING_S seconds at most."""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(CLOSING_S):
            async for _ in parts:
                pass
