"""What client, servers and judges send each other: payloads in sealed memory files, frames on streams."""

import fcntl
import os
import struct
from collections.abc import Sequence

LONGEST_MESSAGE = 2000
"""Bytes of what a verdict says beside its name."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_LENGTH = struct.Struct("<I")
_SMALL = 1 << 16


class Malformed(Exception):
    """The other side broke the protocol."""


def memory_file(name: str, parts: Sequence[bytes]) -> int:
    """A descriptor of a read-only file in memory, at offset 0."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def payload(*blobs: bytes) -> int:
    """A memory file of blobs behind their sizes. The fork servers pass it on and never read it."""
    sizes = (len(blobs), *map(len, blobs))
    return memory_file("payload", [struct.pack(f"<{len(sizes)}Q", *sizes), *blobs])


def read_payload(fd: int) -> list[bytes]:
    """The inverse of `payload`."""
    (count,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    at = 8 + 8 * count
    blobs = []
    for size in struct.unpack(f"<{count}Q", os.pread(fd, 8 * count, 8)):
        blob = os.pread(fd, size, at)
        while len(blob) < size:
            blob += os.pread(fd, size - len(blob), at + len(blob))
        blobs.append(blob)
        at += size
    return blobs


def text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


def blob(string: str) -> bytes:
    return string.encode("utf-8", "surrogatepass")


def cut(string: str, most: int) -> str:
    """The beginning of a text: at most so many bytes of UTF-8, whole characters; lone surrogates are written as escapes."""
    return string[:most].encode("utf-8", "backslashreplace")[:most].decode("utf-8", "ignore")


def verdict(name: str, message: str) -> bytes:
    """What a judge says in the end, in one packet."""
    return f"{name}\0{cut(message, LONGEST_MESSAGE)}".encode()


def read_verdict(data: bytes) -> tuple[str, str]:
    """The inverse of `verdict`. `Malformed` for anything else."""
    name, separator, message = data.partition(b"\0")
    if not separator or not name.isascii() or len(message) > LONGEST_MESSAGE:
        raise Malformed("no verdict")
    return name.decode(), message.decode("utf-8", "replace")


def _exactly(channel: int, count: int) -> bytes | bytearray:
    first = os.read(channel, min(count, _SMALL))
    if len(first) == count:
        return first
    if not first:
        raise EOFError
    data = bytearray(count)
    data[: len(first)] = first
    left = memoryview(data)[len(first) :]
    while left:
        got = os.readv(channel, [left])
        if not got:
            raise EOFError
        left = left[got:]
    return data


def send_frame(channel: int, data: bytes) -> None:
    frame = _LENGTH.pack(len(data)) + data
    sent = os.write(channel, frame)
    if sent < len(frame):
        left = memoryview(frame)[sent:]
        while left:
            left = left[os.write(channel, left) :]


def receive_frame(channel: int, most: int) -> bytes | bytearray:
    """One frame. EOFError when the other side is gone, `Malformed` when the frame is larger than `most` bytes."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > most:
        raise Malformed(f"a frame of {length} bytes, more than {most}")
    return _exactly(channel, length)
