"""Messages between client, servers and judges.

Programs and tests are payloads in sealed memory files; calls and answers are frames on a stream.
"""

import fcntl
import os
import struct
from collections.abc import Sequence

MAX_MESSAGE_LENGTH = 2000
"""Maximum number of bytes of a verdict's message."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_LENGTH = struct.Struct("<I")
_SMALL_BYTES = 1 << 16
"""Number of bytes that the first read of a message takes; most messages are shorter."""


class MalformedMessageError(Exception):
    """The other side broke the protocol."""


def create_memory_file(name: str, parts: Sequence[bytes]) -> int:
    """Create a read-only file in memory and return its descriptor, at offset 0."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def create_payload(*blobs: bytes) -> int:
    """Return a memory file that holds blobs behind their sizes. The fork servers pass it on and never read it."""
    sizes = (len(blobs), *map(len, blobs))
    return create_memory_file("payload", [struct.pack(f"<{len(sizes)}Q", *sizes), *blobs])


def read_payload(fd: int) -> list[bytes]:
    """Undo `create_payload`."""
    (count,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    offset = 8 + 8 * count
    blobs = []
    for size in struct.unpack(f"<{count}Q", os.pread(fd, 8 * count, 8)):
        piece = os.pread(fd, size, offset)
        while len(piece) < size:
            piece += os.pread(fd, size - len(piece), offset + len(piece))
        blobs.append(piece)
        offset += size
    return blobs


def decode_text(blob: bytes) -> str:
    """Decode UTF-8 in which lone surrogates may stand."""
    return blob.decode("utf-8", "surrogatepass")


def encode_text(string: str) -> bytes:
    """Encode a text as UTF-8 in which lone surrogates may stand."""
    return string.encode("utf-8", "surrogatepass")


def truncate_to_bytes(string: str, max_bytes: int) -> str:
    """Return the beginning of a text: at most `max_bytes` bytes of UTF-8, in whole characters.

    Lone surrogates are written as escapes.
    """
    return string[:max_bytes].encode("utf-8", "backslashreplace")[:max_bytes].decode("utf-8", "ignore")


def encode_verdict(name: str, message: str) -> bytes:
    """Encode a judge's verdict as one packet."""
    return f"{name}\0{truncate_to_bytes(message, MAX_MESSAGE_LENGTH)}".encode()


def decode_verdict(data: bytes) -> tuple[str, str]:
    """Undo `encode_verdict`. Raises `MalformedMessageError` for anything else."""
    name, separator, message = data.partition(b"\0")
    if not separator or not name.isascii() or len(message) > MAX_MESSAGE_LENGTH:
        raise MalformedMessageError("no verdict")
    return name.decode(), message.decode("utf-8", "replace")


def _read_exactly(channel: int, count: int) -> bytes | bytearray:
    """Read `count` bytes. Raises EOFError if the other side is gone before."""
    first = os.read(channel, min(count, _SMALL_BYTES))
    if len(first) == count:
        return first
    if not first:
        raise EOFError
    data = bytearray(count)
    data[: len(first)] = first
    remaining = memoryview(data)[len(first) :]
    while remaining:
        count_read = os.readv(channel, [remaining])
        if not count_read:
            raise EOFError
        remaining = remaining[count_read:]
    return data


def send_frame(channel: int, data: bytes) -> None:
    """Write `data` with its length before it, and wait until the other side has taken all of it."""
    frame = _LENGTH.pack(len(data)) + data
    sent = os.write(channel, frame)
    if sent < len(frame):
        remaining = memoryview(frame)[sent:]
        while remaining:
            remaining = remaining[os.write(channel, remaining) :]


def receive_frame(channel: int, max_bytes: int) -> bytes | bytearray:
    """Receive one frame.

    Raises EOFError if the other side is gone, `MalformedMessageError` if the frame is larger than `max_bytes` bytes.
    """
    (length,) = _LENGTH.unpack(_read_exactly(channel, _LENGTH.size))
    if length > max_bytes:
        raise MalformedMessageError(f"a frame of {length} bytes, more than {max_bytes}")
    return _read_exactly(channel, length)
