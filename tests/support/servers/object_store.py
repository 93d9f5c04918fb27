"""A bucket on a real S3 API over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def object_store(name: str = "bucket") -> Iterator[str]:
    """The URI of an empty bucket.

    The environment of this process, and of its children, names its endpoint.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        try:
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=name)
            yield f"s3://{name}"
        finally:
            server.stop()
