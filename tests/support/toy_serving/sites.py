"""Gateways with keys, each on its own port, for the tests of the whole HTTP API."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import uvicorn

from marl_ray.serving.asgi import Gateway
from toy_serving.gateways import SEES, gateway_config, make_bundle, write_keys
from toy_serving.text_gateways import make_text_bundle, text_config

torch.set_num_threads(1)
SESSIONS = [f"known-{k}" for k in range(4)]
WAIT_S = 30.0
"""Deadline of an answer and of a server's end, in seconds."""
# Schemathesis probes without the key where it finds a header of exactly this spelling.
KEYS = {"ops": {"Authorization": "Bearer ops"}, "game": {"Authorization": "Bearer game"}, "none": {}}
TEXTS = ("/generate", "/v1/chat/completions", "/v1/completions")


class Tracebacks(logging.Handler):
    """Errors that threads have logged: threads must survive everything that requests leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.written.append(logging.Formatter().format(record))


class Site(NamedTuple):
    url: str
    port: int


def make_keys(folder: Path) -> str:
    return write_keys(folder / "keys.yaml", ops=("admin", "inference", "outcomes"), game=("inference", "outcomes"))


@contextmanager
def running(gateway: Gateway) -> Iterator[Site]:
    """The gateway on its own port; at the end no thread may have left a traceback."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(gateway, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    tracebacks = Tracebacks()
    logging.getLogger("marl_ray").addHandler(tracebacks)
    try:
        yield Site(f"http://127.0.0.1:{port}", port)
    finally:
        logging.getLogger("marl_ray").removeHandler(tracebacks)
        server.should_exit = True
        thread.join(WAIT_S)
        listening.close()
    assert not thread.is_alive()
    assert not tracebacks.written, tracebacks.written[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with keys and two experiments."""
    folder = tmp_path_factory.mktemp("fuzz")
    bundles = {arm: make_bundle(folder, k) for k, arm in enumerate(("zero", "one", "two", "three", "four"))}
    for arm, bundle in bundles.items():
        (folder / arm).symlink_to(bundle)
    more: dict[str, Any] = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "decision_log": str(folder / "log")}
    more |= {"api_keys": make_keys(folder), "cache": {"url": "memory:"}}
    config = gateway_config(bundles, folder / "x.db", names=("exp", "other"), **more)
    with running(Gateway(config, seed=0)) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # so that generated requests can name the bundles
        with httpx.Client(base_url=made.url, headers=KEYS["ops"]) as client:
            for session in SESSIONS:
                act(client, session)
        yield made


@pytest.fixture(scope="module")
def text_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with keys and an experiment of language models."""
    folder = tmp_path_factory.mktemp("texts")
    bundles = {arm: make_text_bundle(folder, k) for k, arm in enumerate(("one", "two"))}
    with running(Gateway(text_config(bundles, folder, api_keys=make_keys(folder)), seed=0)) as made:
        yield made


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=WAIT_S, headers=KEYS["ops"]) as made:
        yield made


def act(client: httpx.Client, session: str, **more: Any) -> dict[str, Any]:
    sent = {"experiment": "exp", "session_id": session, "observations": SEES} | more
    answer = client.post("/v1/act", json=sent)
    assert answer.status_code == 200, answer.text
    answered: dict[str, Any] = answer.json()
    return answered
