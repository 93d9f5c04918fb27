"""Creates a file that nobody else has created, the one step in which two owners of a name meet."""

import os
import secrets
import time
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.stored_files.durability import sync_to_disk
from marl_ray.stored_files.temporary_files import write_complete

SETTLE_S = 2.0
"""Seconds after which the last writer of a file has won, on storage that can only overwrite."""
S3_TIMEOUT_S = 10.0
"""Maximum seconds that one request to an object store may take; it is tried three times."""
TAKEN_CODES = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
"""Codes by which S3 says that the object is there, or is being written."""
UNSUPPORTED_CODES = ("NotImplemented", "501")
"""Codes by which an object store says that it knows no conditional put."""


def create(filesystem: fs.FileSystem, path: str, data: bytes) -> bool:
    """Write a new file, whose folder exists, and return True; False if another writer has written one.

    `data` must differ from that of every other writer, because the content of the file tells who wrote it.

    Local and network storage create it by O_EXCL, S3 by a put with If-None-Match, which replaces nothing. On other storage,
    and on object stores without conditional puts, of several writers within SETTLE_S the last wins. Raises OSError.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        return _create_locally(path, data) or Path(path).read_bytes() == data
    if filesystem.type_name == "s3":
        put = _put_if_absent(filesystem, path, data)
        if put is not None:  # a put whose answer was lost is refused when it is repeated
            return put or _read_content(filesystem, path) == data
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        return False
    try:
        write_complete(filesystem, path, data, secrets.randbits(60))  # two writers at once leave no mixture
    except FileNotFoundError:  # the owner, which was first, has removed temporary files
        return False
    time.sleep(SETTLE_S)
    return _read_content(filesystem, path) == data


def _create_locally(path: str, data: bytes) -> bool:
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(data)  # not `os.write`, which writes a part where the disk is nearly full
            stream.flush()
            os.fsync(file)
        sync_to_disk(Path(path).parent)
    except OSError:  # such as a full disk: an empty file would refuse everybody
        Path(path).unlink(missing_ok=True)
        raise
    return True


def _read_content(filesystem: fs.FileSystem, path: str) -> bytes | None:
    """Return the content of a file; None if there is none."""
    try:
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None


def _put_if_absent(filesystem: fs.FileSystem, path: str, data: bytes) -> bool | None:
    """Put an object unless there is one, and return whether it was made; None if the store knows no conditional put."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = path.partition("/")
    try:
        _client(filesystem).put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code"))
        if code in TAKEN_CODES:
            return False
        if code in UNSUPPORTED_CODES:
            return None
        raise OSError(str(error)) from error
    except BotoCoreError as error:
        raise OSError(str(error)) from error
    return True


def _client(filesystem: Any) -> Any:
    """Return an S3 client of the same endpoint, with the same credentials, as pyarrow's file system.

    That file system has no conditional put. What the URI does not say both read from the environment
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...).
    """
    import boto3
    from botocore.config import Config

    _, (options,) = filesystem.__reduce__()  # pyarrow has no other way to read them than that of pickle
    endpoint = options["endpoint_override"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{options['scheme']}://{endpoint}"
    return boto3.client(
        "s3",
        endpoint_url=endpoint or None,
        region_name=options["region"] or os.environ.get("AWS_REGION") or None,
        aws_access_key_id=options["access_key"] or None,
        aws_secret_access_key=options["secret_key"] or None,
        aws_session_token=options["session_token"] or None,
        config=Config(
            connect_timeout=S3_TIMEOUT_S,
            read_timeout=S3_TIMEOUT_S,
            retries={"total_max_attempts": 3},
            request_checksum_calculation="when_required",  # older object stores refuse what they do not know
            s3={"addressing_style": "path" if endpoint and not options["force_virtual_addressing"] else "auto"},
        ),
    )
