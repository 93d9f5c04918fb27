"""The five programs that WebArena's tasks name, on the open page or through the shop's own API.

Source: https://github.com/web-arena-x/webarena, evaluation_harness/helper_functions.py.
"""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from marl_ray.envs.web.browser.errors import BrowserError
from marl_ray.envs.web.browser.session import BrowserSession
from marl_ray.envs.web.webarena.tasks.programs import LAST_URL, ProgramCall
from marl_ray.errors import one_line

ADMIN_ACCOUNT = {"username": "admin", "password": "admin1234"}
"""The account that WebArena's own shop comes with."""
REQUEST_S = 10.0
"""Seconds that the shop may take for each request."""
_ROLE_SCRIPT = """(account) => {
    const names = [...document.querySelectorAll("td[data-label='Account'] span.gl-avatar-labeled-sublabel")];
    return document.querySelectorAll("td.col-max-role span")[names.findIndex(n => n.outerText === "@" + account)].outerText;
}"""


async def run_program(call: ProgramCall, session: BrowserSession, sites: Mapping[str, str]) -> str:
    """Return the result of a program.

    `sites` has the base URLs. As in WebArena, `__last_url__` is where the page is now: earlier checks may have moved
    it. Raises BrowserError if the shop does not answer as it should.
    """
    arguments = [argument.replace(LAST_URL, session.url) for argument in call.arguments]
    match call.name:
        case "reddit_get_post_url":
            return post_url(arguments[0])
        case "gitlab_get_project_memeber_role":
            return await _read_role(session, arguments[1])
        case "shopping_get_latest_order_url":
            return await _latest_order_url(sites["shopping"])
        case "shopping_get_sku_latest_review_author":
            return await _latest_review(sites["shopping"], arguments[0], "nickname")
        case "shopping_get_sku_latest_review_rating":
            return await _latest_review(sites["shopping"], arguments[0], "ratings", 0, "percent")
    raise AssertionError(f"{call.name} is not in PROGRAMS")


def post_url(url: str) -> str:
    """Return the address of a post in the forum, from that of the post or of one of its comments.

    Other addresses stay as they are.
    """
    parts = urlsplit(url)
    path = parts.path.split("/")
    if len(path) < 4 or path[1] != "f":
        return url
    return f"{parts.scheme}://{parts.netloc}/f/{path[2]}/{path[3]}/"


async def _read_role(session: BrowserSession, account: str) -> str:
    try:
        return str(await session.page.evaluate(_ROLE_SCRIPT, account))
    except Exception as error:
        if type(error).__module__.startswith("playwright"):
            return ""  # as in WebArena: no such member has no role
        raise


async def _latest_order_url(shop: str) -> str:
    query = {
        "searchCriteria[sortOrders][0][field]": "created_at",
        "searchCriteria[sortOrders][0][direction]": "DESC",
        "searchCriteria[pageSize]": "1",
    }
    orders = await _api_reply(shop, "/rest/V1/orders", query)
    try:
        return f"{shop}/sales/order/view/order_id/{int(orders['items'][0]['increment_id'])}/"
    except (LookupError, TypeError, ValueError) as error:
        raise BrowserError(f"{shop}: the orders have no increment_id of the latest") from error


async def _latest_review(shop: str, sku: str, *keys: str | int) -> str:
    """Return the value at these keys of the latest review; empty if there is none."""
    value = await _api_reply(shop, f"/rest/V1/products/{sku}/reviews", {})
    if value == []:
        return ""
    try:
        for key in (-1, *keys):
            value = value[key]
    except (LookupError, TypeError) as error:
        raise BrowserError(f"{shop}: the latest review of {sku} has no {keys[-1]}") from error
    return str(value)


async def _api_reply(shop: str, path: str, query: Mapping[str, str]) -> Any:
    """Return the shop's JSON for a path, asked for as its administrator.

    Raises BrowserError if an answer is none, or late.
    """
    try:
        async with httpx.AsyncClient(timeout=None) as client:  # noqa: S113  its timeouts are of each read alone
            async with asyncio.timeout(REQUEST_S):
                token = await client.post(f"{shop}/rest/default/V1/integration/admin/token", json=ADMIN_ACCOUNT)
            token.raise_for_status()
            headers = {"Authorization": f"Bearer {token.json()}"}
            async with asyncio.timeout(REQUEST_S):
                reply = await client.get(f"{shop}{path}", params=dict(query), headers=headers)
            reply.raise_for_status()
            return reply.json()
    except TimeoutError:
        raise BrowserError(f"{shop}{path}: no whole answer within {REQUEST_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
        raise BrowserError(f"{shop}{path}: {one_line(error)}") from error
