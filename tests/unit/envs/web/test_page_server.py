"""The servers of pages: a browser that leaves in the middle of an answer is no error."""

import http.server
import socket
import struct
import threading
from urllib.parse import urlsplit

import pytest
from waiting import until

from marl_ray.envs.web.page_server import serve_pages


@pytest.mark.parametrize("broken", [False, True])
def test_only_faults_of_the_pages_are_shown(capfd, broken):
    client_left = threading.Event()
    handlers: list[threading.Thread] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            handlers.append(threading.current_thread())
            assert client_left.wait(60)
            if broken:
                raise ValueError("a page is broken")
            for _ in range(100):
                self.wfile.write(bytes(1 << 16))

    address = urlsplit(serve_pages(Handler, "test"))
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets the connection
    client_left.set()
    until(lambda: handlers and not handlers[0].is_alive(), "the end of the request")
    shown = capfd.readouterr().err
    assert "ValueError: a page is broken" in shown if broken else shown == ""
