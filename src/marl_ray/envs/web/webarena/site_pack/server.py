"""The three sites on ports of this machine. A browser without a cookie is a visitor who has changed nothing yet."""

import functools
import http.server
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from marl_ray.envs.web.page_server import serve_pages
from marl_ray.envs.web.webarena.site_pack.pages import SITE_NAMES, Visit, reply
from marl_ray.envs.web.webarena.site_pack.world import synthetic_world

COOKIE = "visitor"
MAX_VISITORS = 10_000
"""Visitors that are remembered; the earliest are forgotten."""


class _Visits:
    """Changes of every visitor."""

    def __init__(self) -> None:
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def of_cookie(self, cookie: str) -> tuple[str, Visit]:
        """Return the visitor of a cookie, or a new one with its own name."""
        with self._lock:
            name = cookie.removeprefix(f"{COOKIE}=")
            if name not in self._visits:
                name = secrets.token_hex(8)
                self._visits[name] = Visit()
                if len(self._visits) > MAX_VISITORS:
                    self._visits.popitem(last=False)
            return name, self._visits[name]


@functools.cache
def serve_sites(seed: int) -> Mapping[str, str]:
    """Return the base URL of each site in the world of a seed.

    Threads of this process serve them to this machine alone.
    """
    visits = _Visits()  # one for all sites, because cookies do not know ports
    return {site: serve_pages(_handler(site, seed, visits), f"site {site}") for site in SITE_NAMES}


def _handler(site: str, seed: int, visits: _Visits) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30.0

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            name, visit = visits.of_cookie(self.headers.get("Cookie", ""))
            answer = reply(site, parts.path, query, synthetic_world(seed), visit)
            data = answer.html.encode()
            self.send_response(302 if answer.location else answer.status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Set-Cookie", f"{COOKIE}={name}; Path=/; HttpOnly; SameSite=Lax")
            if answer.location:
                self.send_header("Location", answer.location)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
