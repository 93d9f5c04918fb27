"""Pages of this process, served to this machine alone."""

import contextlib
import http.server
import sys
import threading
from typing import Any


class _PageServer(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that leaves a page closes its connections, which is no fault of anybody.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            with contextlib.suppress(OSError):
                super().handle_error(request, client_address)


def serve_pages(handler: Any, name: str) -> str:
    """Serve with this `http.server` handler in threads, the first of which has the name, until the process ends.

    Returns the base URL.
    """
    server = _PageServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
