"""The pages for people: `/ui` and `/docs`."""

import time
from dataclasses import asdict
from functools import partial

from marl_ray.drawing import read_stylesheet
from marl_ray.experiments.lifecycle import RETREATS, Action
from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.experiment_actions import apply_change, describe_experiment, experiment_rows, read_curves
from marl_ray.serving.http.messages import HTML, Request, RequestError, Response
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.pages import render
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service

ASK_FOR_KEY = ((b"www-authenticate", b'Basic realm="marl-ray: any name, and as password a key with the scope read"'),)
"""Makes a browser ask for a key, which allows reading but no action."""


def _page_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, HTML, render.HEADERS)


async def _admit(service: Service, request: Request) -> None:
    try:
        await service.admission.admit_reader(request)
    except RequestError as error:
        if error.status == 401:
            error.headers = ASK_FOR_KEY
        raise


async def _may_read(service: Service, request: Request, form: dict[str, str]) -> bool:
    """Return True if the key of a form, or of its request, has the scope to read."""
    try:
        service.admission.keys.check_secret(form.get("key", ""), "read")
    except RequestError:
        try:
            await service.admission.admit_reader(request)
        except RequestError:
            return False
    return True


async def docs(service: Service, request: Request, document: bytes) -> Response:
    """Answer `GET /docs`: the OpenAPI document as a page."""
    base = request.root_path
    return _page_response(await service.shared_reads.read(("docs", base), lambda: render.docs_page(document, base)))


async def index(service: Service, request: Request) -> Response:
    """Answer `GET /ui`."""
    await _admit(service, request)
    return _page_response(render.index_page(experiment_rows(service), request.root_path))


async def stylesheet(service: Service, request: Request) -> Response:
    """Answer `GET /ui/style.css`."""
    return Response(read_stylesheet(), content_type=b"text/css; charset=utf-8")


async def experiment(service: Service, request: Request, live: bool = False) -> Response:
    """Answer `GET /ui/experiments/{name}`."""
    await _admit(service, request)
    router = service.endpoints.experiment(request.path_params["name"])
    make = partial(_experiment_page, service, router, request.root_path, None, {}, live)
    return _page_response(await service.shared_reads.read(("page", router.config.name, request.root_path, live), make))


def _experiment_page(
    service: Service, router: Router, base: str, message: str | None, form: dict[str, str], live: bool = False
) -> bytes:
    name = router.config.name
    audit = [asdict(entry) for entry in service.stores.experiments.audit(name)]
    plot = read_curves(service, router)
    return render.experiment_page(
        describe_experiment(service, router), plot, audit, base, message, form=form, live=live, at=time.time()
    )


async def change(action: Action, service: Service, request: Request) -> Response:
    """Answer `POST /ui/experiments/{name}/{action}`.

    The form itself contains the admin key, so a foreign page cannot act for a person.
    """
    router = service.endpoints.experiment(request.path_params["name"])
    base = request.root_path
    form: dict[str, str] = {}
    try:
        form = render.parse_form(await request.body())
        actor = service.admission.keys.check_secret(form.get("key", ""), "admin")
        service.admission.limit(actor, 1)
        data: dict[str, object] = {"reason": form.get("reason"), "arm": form.get("arm") or None}
        epoch = form.get("epoch", "")
        # A form may be old, but an action that only takes traffic away is right on any epoch.
        if epoch.isdecimal() and action not in RETREATS:
            data["epoch"] = int(epoch)
        await apply_change(service, router, actor, action, data)
    except ServingError as refusal:
        error = as_request_error(refusal)
        message = f"{error.field}: {error}" if error.field else str(error)
        if error.status in (401, 403):
            message = "admin key: expected the secret of a key with the scope admin"
        if not await _may_read(service, request, form):
            error.headers = ASK_FOR_KEY if error.status == 401 else error.headers
            raise error from None  # a caller who may not read gets no more than the refusal
        make = partial(_experiment_page, service, router, base, message, form)
        return _page_response(await service.shared_reads.read(object(), make), error.status)
    # A redirect to a fresh page, because reloading an answer to a form would send the form again.
    headers = ((b"location", f"{base}/ui/experiments/{router.config.name}".encode()),)
    return Response(b"", 303, HTML, headers)
