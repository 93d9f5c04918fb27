"""Pages of a task reach no host but those of its sites, by whatever way a page knows."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers.http_server import serving_http
from servers.little_site import web_record
from servers.playwright_chromium import AGENT, no_chromium_stays

from marl_ray.envs.web.webarena.environment import WebArena

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow
LOOK_S = 1.0
"""Seconds in which a page's attempt arrives where nothing stops it."""
_WORKER = 'URL.createObjectURL(new Blob(["{script}"]))'
WAYS = {
    "a picture behind a redirect": '<img src="/redirect">',
    "a page behind a redirect": '<script>location = "/redirect"</script>',
    "a frame behind a redirect": '<iframe src="/redirect"></iframe>',
    "a form behind a redirect": '<form method=post action="/redirect"></form><script>document.forms[0].submit()</script>',
    "a beacon behind a redirect": '<script>navigator.sendBeacon("/redirect", "x")</script>',
    "a picture": '<img src="{url}/picture">',
    "a page": '<script>location = "{url}/page"</script>',
    "a window": '<script>window.open("{url}/window")</script>',
    "a request that outlives the page": '<script>fetch("{url}/kept", {keepalive: true, mode: "no-cors"})</script>',
    "a worker": "<script>new Worker(" + _WORKER.format(script="fetch('{url}/w', {mode: 'no-cors'})") + ")</script>",
    "a shared worker": "<script>new SharedWorker("
    + _WORKER.format(script="fetch('{url}/w', {mode: 'no-cors'})")
    + ")</script>",
    "a socket": '<script>new WebSocket("ws://{place}/socket")</script>',
    "a worker's socket": "<script>new Worker("
    + _WORKER.format(script="new WebSocket('ws://{place}/w')")
    + ")</script>",
    "WebTransport": '<script>new WebTransport("https://{place}/transport")</script>',
    "WebRTC": '<script>const c = new RTCPeerConnection({iceServers: [{urls: "stun:{place}"}, '
    '{urls: "turn:{place}?transport=tcp", username: "a", credential: "b"}]}); c.createDataChannel("x"); '
    "c.createOffer().then(offer => c.setLocalDescription(offer))</script>",
    "prefetching": '<link rel=prefetch href="{url}/prefetched"><link rel=preconnect href="{url}">',
    "prerendering": '<script type=speculationrules>{"prerender": [{"source": "list", "urls": ["{url}/rendered"]}], '
    '"prefetch": [{"source": "list", "urls": ["{url}/fetched", "/redirect"]}]}</script>',
}


class Elsewhere:
    """A host that no page may reach: what arrives there is counted."""

    def __init__(self) -> None:
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.place = f"127.0.0.1:{self.tcp.getsockname()[1]}"
        self.udp.bind(self.tcp.getsockname())
        self.arrived: list[bytes] = []
        for listen in (self._connections, self._datagrams):
            threading.Thread(target=listen, daemon=True).start()

    def _connections(self) -> None:
        while True:
            try:
                connection, _ = self.tcp.accept()
            except OSError:
                return
            threading.Thread(target=self._first_bytes, args=(connection,), daemon=True).start()

    def _first_bytes(self, connection: socket.socket) -> None:
        with closing(connection):
            connection.settimeout(5.0)
            try:
                data = connection.recv(200)
            except OSError:
                return
            if data:  # a connection without a byte is one that Chromium keeps for later
                self.arrived.append(data)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")

    def _datagrams(self) -> None:
        while True:
            try:
                self.arrived.append(self.udp.recvfrom(2000)[0])
            except OSError:
                return

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


@contextmanager
def _site(elsewhere: str) -> Iterator[str]:
    """The base URL of a site that has a page for each of `WAYS`, by number, and a redirect to the host elsewhere."""
    pages = [
        html.replace("{url}", f"http://{elsewhere}").replace("{place}", elsewhere).encode() for html in WAYS.values()
    ]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            data = pages[int(name)] if name.isdigit() else b"Hello"
            self.send_response(302 if name == "redirect" else 200)
            if name == "redirect":
                self.send_header("Location", f"http://{elsewhere}/redirected")
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler) as url:
        yield url


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with closing(Elsewhere()) as running:
        yield running


@pytest.fixture(scope="module")
def site(elsewhere: Elsewhere) -> Iterator[str]:
    with _site(elsewhere.place) as url:
        yield url


@pytest.mark.parametrize("way", WAYS)
def test_no_page_reaches_another_host(tmp_path, site, elsewhere, way):
    infos = _visit(tmp_path, site, elsewhere, way)
    assert elsewhere.arrived == []
    assert infos["solved"]


@pytest.mark.parametrize("way", ["a page behind a redirect", "a shared worker", "WebRTC"])
def test_a_host_that_is_allowed_is_reached(tmp_path, site, elsewhere, way):
    infos = _visit(tmp_path, site, elsewhere, way, allow=[f"http://{elsewhere.place}"])
    assert elsewhere.arrived
    assert infos["metrics"]["blocked"] == 0


def _visit(tmp_path: Path, site: str, elsewhere: Elsewhere, way: str, **options: Any) -> dict[str, Any]:
    """Play an episode that looks at the page of this way for `LOOK_S`."""
    elsewhere.arrived.clear()
    path = tmp_path / "tasks.json"
    start = f"/{list(WAYS).index(way)}"
    path.write_text(json.dumps([web_record(start, ["string_match"], reference_answers={"exact_match": "done"})]))
    env = WebArena(str(path), sites={"shopping": site}, held_out=0.0, step_s=10.0, **options)
    env.reset(seed=0)
    time.sleep(LOOK_S)
    env.step("stop [done]")
    return dict(env.infos[AGENT])
