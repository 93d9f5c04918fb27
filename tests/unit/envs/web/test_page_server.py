"""The servers of pages: a browser that leaves in the middle of an answer is no error."""

import http.server
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest
from waiting import until

from marl_ray.envs.web.page_server import serve_pages


@pytest.mark.parametrize("broken", [False, True])
def test_only_faults_of_the_pages_are_shown(capfd, broken):
    client_left, over = threading.Event(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert client_left.wait(60)
            try:
                if broken:
                    raise ValueError("a page is broken")
                for _ in range(100):
                    self.wfile.write(bytes(1 << 16))
            finally:
                over.set()

    address = urlsplit(serve_pages(Handler, "test"))
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets the connection
    client_left.set()
    assert over.wait(60)
    shown = ""

    def shows_the_fault() -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return "ValueError: a page is broken" in shown

    if broken:
        until(shows_the_fault, "the page's fault")
    else:
        time.sleep(0.1)
        assert not shows_the_fault() and shown == ""
