"""The pages for people and the description for machines: `/ui`, `/docs` and `/openapi.json`."""

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from marl_ray.experiments.states import RETREATS, Action
from marl_ray.serving.handlers.experiments import changed, described, plotted, rows
from marl_ray.serving.handlers.openapi import openapi
from marl_ray.serving.http.protocol import HTML, Request, RequestError, Response
from marl_ray.serving.pages import render
from marl_ray.serving.routing.router import Router

if TYPE_CHECKING:
    from marl_ray.serving.asgi import Gateway


ASKS = ((b"www-authenticate", b'Basic realm="marl-ray: any name, and as password a key with the scope read"'),)
"""Lets a browser ask for a key; it opens reading alone, and no action."""


def _page(body: bytes, status: int = 200) -> Response:
    return Response(body, status, HTML, render.HEADERS)


async def _admit(gateway: "Gateway", request: Request) -> None:
    try:
        await gateway.admit_reader(request)
    except RequestError as error:
        if error.status == 401:
            error.headers = ASKS
        raise


async def _may_read(gateway: "Gateway", request: Request, form: dict[str, str]) -> bool:
    """Whether the key of a form, or of its request, opens reading."""
    try:
        gateway.keys.check_secret(form.get("key", ""), "read")
    except RequestError:
        try:
            await gateway.admit_reader(request)
        except RequestError:
            return False
    return True


async def document(gateway: "Gateway", request: Request) -> Response:
    """`GET /openapi.json`."""
    from marl_ray.serving.handlers.routes import ROUTES  # which name this function

    # In a thread, as making it takes a fifth of a second; it is kept then.
    return Response(await gateway.in_thread(openapi, ROUTES, request.root_path, bool(gateway.keys.keys)))


async def docs(gateway: "Gateway", request: Request) -> Response:
    """`GET /docs`: the OpenAPI document as a page."""
    found = await document(gateway, request)
    return _page(
        await gateway.readings.read(
            ("docs", request.root_path), lambda: render.docs_page(found.body, request.root_path)
        )
    )


async def index(gateway: "Gateway", request: Request) -> Response:
    """`GET /ui`."""
    await _admit(gateway, request)
    return _page(render.index_page(rows(gateway), request.root_path))


async def stylesheet(gateway: "Gateway", request: Request) -> Response:
    """`GET /ui/style.css`."""
    return Response(render.stylesheet(), content_type=b"text/css; charset=utf-8")


async def experiment(gateway: "Gateway", request: Request) -> Response:
    """`GET /ui/experiments/{name}`."""
    await _admit(gateway, request)
    router = gateway.endpoints.experiment(request.path.split("/")[3])
    live = request.path.count("/") == 4
    make = partial(_experiment_page, gateway, router, request.root_path, None, {}, live)
    return _page(await gateway.readings.read(("page", router.config.name, request.root_path, live), make))


def _experiment_page(
    gateway: "Gateway", router: Router, base: str, message: str | None, form: dict[str, str], live: bool = False
) -> bytes:
    name = router.config.name
    audit = [asdict(entry) for entry in gateway.store.audit(name)]
    found = plotted(gateway, router)
    return render.experiment_page(
        described(gateway, router), found, audit, base, message, given=form, live=live, at=time.time()
    )


async def change(gateway: "Gateway", request: Request) -> Response:
    """`POST /ui/experiments/{name}/{action}`: the form's own field holds the admin key, so no site can act for a person."""
    parts = request.path.split("/")
    router, action, base = gateway.endpoints.experiment(parts[3]), parts[4], request.root_path
    form: dict[str, str] = {}
    try:
        form = render.parse_form(await request.body())
        actor = gateway.keys.check_secret(form.get("key", ""), "admin")
        gateway.limit(actor, 1)
        data: dict[str, Any] = {"reason": form.get("reason"), "arm": form.get("arm") or None}
        epoch = form.get("epoch", "")
        # A form may be old: what only takes traffic away is right all the same.
        if epoch.isdecimal() and Action(action) not in RETREATS:
            data["epoch"] = int(epoch)
        await changed(gateway, router, actor, action, data)
    except RequestError as error:
        message = f"{error.field}: {error}" if error.field else str(error)
        if error.status in (401, 403):
            message = "admin key: expected the secret of a key with the scope admin"
        if not await _may_read(gateway, request, form):
            error.headers = ASKS if error.status == 401 else error.headers
            raise  # who may not read learns no more than that
        make = partial(_experiment_page, gateway, router, base, message, form)
        return _page(await gateway.readings.read(object(), make), error.status)
    # A fresh page: reloading it must not send the form again.
    headers = ((b"location", f"{base}/ui/experiments/{router.config.name}".encode()),)
    return Response(b"", 303, HTML, headers)
