"""A client's timeout limits a whole request, however slowly its answer comes."""

import httpx
import pytest
from servers.dripping_server import dripping

from marl_ray.deadlines.http_client import DeadlineClient

TIMEOUT_S = 0.3


@pytest.fixture(scope="module")
def url():
    with dripping() as url:
        yield url


@pytest.mark.parametrize("part", ["headers", "body"])
def test_an_answer_that_comes_byte_by_byte_is_late(url, part):
    with DeadlineClient(base_url=url, timeout=TIMEOUT_S) as client:
        with pytest.raises(httpx.ReadTimeout, match=r"^no whole answer within 0\.3 s$"):
            client.get(f"/{part}")
        with pytest.raises(httpx.ReadTimeout), client.stream("POST", f"/{part}", content=b"x") as answer:
            answer.read()


def test_every_request_of_a_connection_has_a_deadline_of_its_own(url):
    with DeadlineClient(base_url=url, timeout=60) as client:
        first = client.get("/")
        with pytest.raises(httpx.ReadTimeout, match=r"within 0\.3 s"):
            client.get("/headers", timeout=TIMEOUT_S)
        assert first.json() == client.post("/", json={"a": "b" * 100_000}).json() == {}


def test_without_a_timeout_a_slow_answer_is_waited_for(url):
    with DeadlineClient(base_url=url, timeout=None) as client:
        assert client.get("/headers").status_code == 200


def test_a_connection_through_a_proxy_has_the_deadline_too(url):
    with (
        DeadlineClient(proxy=url, timeout=TIMEOUT_S) as client,
        pytest.raises(httpx.ReadTimeout, match="no whole answer"),
    ):
        client.get("http://anywhere.example/headers")


def test_a_host_that_does_not_answer_is_an_error_of_the_connection():
    with DeadlineClient(timeout=5) as client, pytest.raises(httpx.ConnectError, match="refused"):
        client.get("http://127.0.0.1:9/")
