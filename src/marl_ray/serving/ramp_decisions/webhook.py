"""The webhook, which notifies another service of every rollback, promotion and stage.

Each notice is delivered at least once: a thread sends an entry of the audit log until the other service answers 2xx, or
until the deadline. No decision waits for it. `experiments.store.notices` lets one of several replicas send an entry.
"""

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

import httpx
import orjson

from marl_ray.config.serving.gateway import WebhookConfig
from marl_ray.deadlines.http_client import DeadlineClient
from marl_ray.errors import MarlRayError, one_line
from marl_ray.experiments.store.notices import Notices
from marl_ray.experiments.store.records import AuditEntry

CHECK_S = 15.0
"""Seconds between two checks for due notices if nothing has changed."""
SEND_S = 10.0
"""Seconds that one request may take; all other notices wait meanwhile."""
CLAIM_S = 3 * SEND_S
"""Seconds for which other replicas leave an entry to the replica that sends it."""
MAX_PAUSE_S = 300.0
"""Maximum number of seconds between two attempts to send an entry."""
DOUBLED_PAUSES = 9
"""Number of attempts, each after twice the pause of the one before, after which the pause is `MAX_PAUSE_S`."""
CLOSE_S = 2.0
"""Seconds that closing waits for the thread."""
_log = logging.getLogger(__name__)


class Webhook:
    """Delivers entries of the audit log, for one replica."""

    def __init__(self, config: WebhookConfig, notices: Notices, endpoints: Callable[[], Mapping[str, str]]):
        """Read the secret of the signatures from the environment.

        `endpoints` returns the experiments that this gateway serves, each with its endpoint. Raises MarlRayError if the
        secret is not in the environment.
        """
        secret = os.environ.get(config.secret_env)
        if not secret:
            raise MarlRayError(f"webhook.secret_env: expected a secret in the environment variable {config.secret_env}")
        self._config = config
        self._notices = notices
        self._endpoints = endpoints
        self._secret = secret.encode()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        """Start the thread that delivers; once only."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread because something has changed; never blocks."""
        self._news.set()

    def close(self) -> None:
        """End the thread; another replica, or the next process, delivers the rest."""
        self._closing.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def deliver(self) -> float:
        """Send the due notices and return the seconds until the next one may be due. Raises StoreError."""
        now = time.time()
        endpoints = self._endpoints()
        pause = CHECK_S
        for entry, attempts in self._notices.due_changes(endpoints.keys(), now - self._config.deadline_s, now):
            now = time.time()
            if self._closing.is_set() or not self._notices.claim(entry.id, now, now + CLAIM_S):
                continue
            failure = self._send(entry, endpoints[entry.experiment])
            wait = MAX_PAUSE_S if attempts >= DOUBLED_PAUSES else 2.0**attempts
            sent = time.time() if failure is None else None
            self._notices.note_delivery(entry.id, delivered_at=sent, next_at=time.time() + wait)
            if failure is not None:
                pause = min(pause, wait)
                _log.error("webhook: %s of %s is not delivered yet: %s", entry.action, entry.experiment, failure)
        return pause

    def _send(self, entry: AuditEntry, endpoint: str) -> str | None:
        """Send an entry. Returns the reason why that failed, None if the other service has it."""
        body = orjson.dumps(asdict(entry) | {"endpoint": endpoint})
        at = str(int(time.time()))
        signature = hmac.new(self._secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()
        headers = {
            "content-type": "application/json",
            "x-marl-ray-delivery": str(entry.id),
            "x-marl-ray-timestamp": at,
            "x-marl-ray-signature": f"sha256={signature}",
        }
        try:
            # The body is not read, because an endless one would delay all other entries.
            with (
                DeadlineClient(timeout=SEND_S) as client,
                client.stream("POST", self._config.url, content=body, headers=headers) as answer,
            ):
                return None if answer.is_success else f"it answers {answer.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return one_line(error)

    def _run(self) -> None:
        failing = False
        pause = 0.0
        while not self._closing.is_set():
            self._news.wait(pause)
            self._news.clear()
            try:
                pause = self.deliver()
                failing = False
            except Exception as error:  # the thread must survive until the database is back
                if not failing:
                    _log.error("webhook: what is due is not known: %s", one_line(error))
                failing = True
                pause = CHECK_S
