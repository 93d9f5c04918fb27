"""Cross-origin requests: which pages of other sites may use this gateway through a browser.

Credentials (cookies, or what a browser stores for a site) are never allowed. So a foreign page can use only the keys
that it brings itself, and `*` is safe.
"""

from marl_ray.serving.http.messages import Headers, Request, Response

METHODS = b"GET, POST"
REQUEST_HEADERS = b"authorization, content-type, x-arm, x-request-id, x-request-timeout-seconds, x-session-id"
"""Headers that a page may send."""
RESPONSE_HEADERS = b"retry-after, x-arm, x-experiment, x-holdout, x-request-id, x-session-id"
"""Headers that a page may read."""
PREFLIGHT_S = b"600"
"""Seconds that a browser may remember an answer to its preflight request."""


def allow_origin_headers(origins: tuple[str, ...], request: Request) -> Headers:
    """Return the headers of every answer that tell the browser whether a page of the request's origin may read it."""
    if "*" in origins:
        return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", RESPONSE_HEADERS))
    vary = ((b"vary", b"origin"),) if origins else ()
    origin = request.headers.get(b"origin")
    if origin is None or origin.decode("latin-1") not in origins:
        return vary
    return (*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", RESPONSE_HEADERS))


def preflight(origins: tuple[str, ...], request: Request, method: str) -> Response | None:
    """Return the answer to a browser's preflight request.

    Returns None if the request is no such request, or if its origin is not allowed.
    """
    is_preflight = method == "OPTIONS" and b"access-control-request-method" in request.headers
    names = {name for name, _ in allow_origin_headers(origins, request)}
    if not is_preflight or b"access-control-allow-origin" not in names:
        return None
    headers = ((b"access-control-allow-methods", METHODS), (b"access-control-allow-headers", REQUEST_HEADERS))
    return Response(b"", 204, headers=(*headers, (b"access-control-max-age", PREFLIGHT_S)))
