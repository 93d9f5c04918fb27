"""Rollbacks, promotions and stages are told to another service: at least once, signed, and by one replica at a time."""

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from clocks import Clock
from servers.dripping_server import dripping
from servers.http_server import serving_http
from toy_serving.gateways import gateway_config, serving
from waiting import until, until_async

from marl_ray.config.serving.gateway import WebhookConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.database import schema
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.store import notices as queue
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.notices import Notices
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.ramp_decisions import webhook
from marl_ray.serving.ramp_decisions.webhook import MAX_PAUSE_S, Webhook

SECRET = "between us"
WAIT_S = 60.0
"""Seconds for which the other service waits for a test, and for which an answer that does not end continues."""


class Receiver:
    """The requests that the other service got, and its next answers (200 once nothing is left)."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.url = ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.in_time: list[bool] = []
        """By request, whether the test let it be answered before the other service answered by itself."""
        self.endless = False
        self.client_left = False
        """True if a client has left before an endless answer was over."""


@contextmanager
def listening() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.got.append((dict(self.headers.items()), body))
            receiver.in_time.append(receiver.may_answer.wait(WAIT_S))
            self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
            if receiver.endless:
                self.send_header("content-length", "1000000")
            self.end_headers()
            end = time.monotonic() + WAIT_S * receiver.endless
            while time.monotonic() < end:
                try:
                    self.wfile.write(b".")
                except OSError:
                    receiver.client_left = True
                    return
                time.sleep(0.01)

        def log_message(self, *_: Any) -> None:
            pass

    with serving_http(Handler) as url:
        receiver.url = f"{url}/hook"
        yield receiver


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("MARL_RAY_WEBHOOK_SECRET", SECRET)
    with listening() as requests:
        yield requests


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = open_stores(f"sqlite:///{tmp_path}/x.db")
    arms = {"a": {"digest": "a", "weight": 1}, "b": {"digest": "b", "weight": 1}}
    stores.experiments.open("exp", {"salt": "s", "arms": arms, "endpoint": "game"})
    yield stores
    stores.close()


def hook(receiver: Receiver, stores: Stores, **more: Any) -> Webhook:
    return Webhook(WebhookConfig(url=receiver.url, **more), Notices(stores.database), lambda: {"exp": "game"})


def change(stores: Stores, action: Action, arm: str | None = None) -> None:
    stores.experiments.change(
        "exp", action, epoch=stores.experiments.assignment_state("exp").epoch, actor="ops", reason="r", arm=arm
    )


def test_a_rollback_is_told_once_signed_and_whole(receiver, stores):
    sender = hook(receiver, stores)
    change(stores, Action.PAUSE)  # which nobody is told
    change(stores, Action.ROLLBACK, "b")
    sender.deliver()
    sender.deliver()
    ((headers, body),) = receiver.got
    message = json.loads(body)
    assert (message["experiment"], message["endpoint"], message["action"], message["arm"]) == (
        "exp",
        "game",
        "rollback",
        "b",
    )
    assert (message["actor"], message["reason"], message["after"]["status"]) == ("ops", "r", "rolled_back")
    signed = hmac.new(
        SECRET.encode(), headers["x-marl-ray-timestamp"].encode() + b"." + body, hashlib.sha256
    ).hexdigest()
    assert headers["x-marl-ray-signature"] == f"sha256={signed}"
    assert headers["x-marl-ray-delivery"] == str(message["id"])


def test_what_is_refused_is_sent_again_until_it_is_taken(receiver, stores, caplog):
    receiver.answers = [500, 503]
    sender, notices = hook(receiver, stores), Notices(stores.database)
    change(stores, Action.ROLLBACK, "b")
    waits = []
    for _ in range(5):
        waits.append(sender.deliver())
        for entry, _ in notices.due_changes(["exp"], 0.0, time.time() + 60):  # the pause is over
            notices.note_delivery(entry.id, delivered_at=None, next_at=0.0)
    assert len(receiver.got) == 3
    assert len({body for _, body in receiver.got}) == 1
    assert waits[0] < waits[1] < waits[2]  # longer and longer pauses, then none is due
    assert any("it answers 500" in record.message for record in caplog.records)


def test_after_the_deadline_it_is_given_up(receiver, stores, monkeypatch):
    change(stores, Action.ROLLBACK, "b")
    monkeypatch.setattr(webhook, "time", SimpleNamespace(time=Clock(time.time() + 3600)))
    hook(receiver, stores, deadline_s=3500).deliver()
    assert receiver.got == []


def test_of_several_replicas_one_sends_and_another_goes_on_for_one_that_died(receiver, stores):
    receiver.may_answer.clear()
    change(stores, Action.ROLLBACK, "b")
    senders = [threading.Thread(target=hook(receiver, stores).deliver) for _ in range(4)]
    for sender in senders:
        sender.start()
    until(lambda: [sender.is_alive() for sender in senders].count(True) == 1, "the replicas that leave it to another")
    receiver.may_answer.set()
    for sender in senders:
        sender.join(60)
    assert receiver.in_time == [True]

    notices = Notices(stores.database)
    ((entry, _),) = [(entry, 0) for entry in stores.experiments.audit("exp") if entry.action == "rollback"]
    notices.note_delivery(entry.id, delivered_at=None, next_at=0.0)
    now = time.time()
    assert notices.claim(entry.id, now, now + 30)  # and then it dies
    assert not notices.claim(entry.id, now + 1, now + 31)
    assert notices.due_changes(["exp"], 0.0, now + 1) == []
    assert [notice.id for notice, _ in notices.due_changes(["exp"], 0.0, now + 31)] == [entry.id]
    assert notices.claim(entry.id, now + 31, now + 61)
    notices.note_delivery(entry.id, delivered_at=now, next_at=now)
    assert not notices.claim(entry.id, now + 100, now + 130)


async def test_a_gateway_tells_at_once_and_waits_for_nobody(receiver, bundles, tmp_path):
    receiver.may_answer.clear()
    config = gateway_config(bundles, tmp_path / "x.db", webhook={"url": receiver.url})

    async with serving(config) as (_, first), serving(config):
        first.service.stores.experiments.change(
            "exp", Action.ROLLBACK, epoch=None, actor="gateway", reason="harm", arm="four"
        )
        first.service.follower.poll()
        await until_async(lambda: receiver.got, "the first request")
        receiver.may_answer.set()
        later = time.time() + 3600  # when no claim of a sender holds any more
        await until_async(lambda: not first.service.notices.due_changes(["exp"], 0.0, later), "a recorded delivery")
    assert receiver.in_time == [True], "the change waited for the answer"
    assert [json.loads(body)["arm"] for _, body in receiver.got] == ["four"]


def test_a_secret_that_is_missing_is_named(bundles, tmp_path, monkeypatch):
    monkeypatch.delenv("HOOK", raising=False)
    config = gateway_config(bundles, tmp_path / "x.db", webhook={"url": "http://127.0.0.1:1", "secret_env": "HOOK"})
    with pytest.raises(
        MarlRayError, match=r"^webhook\.secret_env: expected a secret in the environment variable HOOK$"
    ):
        Gateway(config)


def test_entries_of_other_gateways_on_the_same_database_hold_up_none_of_ours(receiver, stores, monkeypatch):
    monkeypatch.setattr(queue, "MAX_DUE_CHANGES", 2)
    for number in range(2):
        arms = {arm: {"digest": f"{arm}{number}", "weight": 1} for arm in "ab"}
        stores.experiments.open(f"theirs{number}", {"salt": "s", "arms": arms, "endpoint": f"their{number}"})
        stores.experiments.change(f"theirs{number}", Action.ROLLBACK, epoch=None, actor="ops", reason="r", arm="b")
    change(stores, Action.ROLLBACK, "b")
    hook(receiver, stores).deliver()
    assert [json.loads(body)["experiment"] for _, body in receiver.got] == ["exp"]


def test_pauses_stay_at_their_longest_however_often_it_was_tried(receiver, stores):
    receiver.answers = [500, 500]
    sender = hook(receiver, stores, deadline_s=1e7)
    change(stores, Action.ROLLBACK, "b")
    sender.deliver()
    with stores.database.write_transaction() as connection:
        connection.execute(sa.update(schema.notices).values(attempts=2_000, next_at=0.0))
    sender.deliver()
    notices = Notices(stores.database)
    assert notices.due_changes(["exp"], 0.0, time.time() + MAX_PAUSE_S - 10) == []
    assert len(notices.due_changes(["exp"], 0.0, time.time() + MAX_PAUSE_S + 10)) == 1


def test_an_answer_that_does_not_end_holds_up_nothing(receiver, stores):
    receiver.endless = True
    change(stores, Action.ROLLBACK, "b")
    hook(receiver, stores).deliver()
    until(lambda: receiver.client_left, "the client to leave an answer that does not end")
    assert Notices(stores.database).due_changes(["exp"], 0.0, time.time() + 1_000) == []


def test_an_answer_that_comes_byte_by_byte_holds_up_the_other_notices_for_one_deadline(stores, monkeypatch, caplog):
    monkeypatch.setattr(webhook, "SEND_S", 0.3)
    monkeypatch.setenv("MARL_RAY_WEBHOOK_SECRET", SECRET)
    change(stores, Action.ROLLBACK, "b")
    with dripping() as url:
        Webhook(WebhookConfig(url=f"{url}/headers"), Notices(stores.database), lambda: {"exp": "game"}).deliver()
    assert "rollback of exp is not delivered yet: no whole answer within 0.3 s" in caplog.text
