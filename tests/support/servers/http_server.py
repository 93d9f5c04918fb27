"""An HTTP server in a thread of the test's own process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """A server that many clients may connect to at once.

    Its end waits for no answer that is still being written.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests with a handler on a port of 127.0.0.1; yields the URL, without a slash at its end."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
