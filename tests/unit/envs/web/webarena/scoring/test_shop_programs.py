"""The programs of WebArena that ask a shop: a shop that does not answer as it should is named in one line."""

import pytest
from servers.dripping_server import DrippingHandler, SlowHeadersHandler, dripping

from marl_ray.envs.web.browser.errors import BrowserError
from marl_ray.envs.web.browser.session import BrowserSession
from marl_ray.envs.web.webarena.scoring import programs
from marl_ray.envs.web.webarena.scoring.programs import run_program
from marl_ray.envs.web.webarena.tasks.programs import ProgramCall

CALL = ProgramCall("shopping_get_latest_order_url", ())


class NoBrowserSession(BrowserSession):
    """A session without a browser, which the shop's programs do not use."""

    def __init__(self):
        self._pages = []


async def test_a_shop_whose_headers_come_byte_by_byte_is_late(monkeypatch):
    monkeypatch.setattr(programs, "REQUEST_S", 0.2)
    with (
        dripping(SlowHeadersHandler) as url,
        pytest.raises(BrowserError, match=rf"^{url}/rest/V1/orders: no whole answer within 0\.2 s$"),
    ):
        await run_program(CALL, NoBrowserSession(), {"shopping": url})


async def test_a_shop_without_orders_is_named():
    with (
        dripping(DrippingHandler) as url,
        pytest.raises(BrowserError, match=f"^{url}: the orders have no increment_id"),
    ):
        await run_program(CALL, NoBrowserSession(), {"shopping": url})
