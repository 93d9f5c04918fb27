"""Bundles that clients asked to load ahead of their experiments, at this replica or at another one."""

import logging
import threading
import time

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.notices import Notices
from marl_ray.serving.arm_loading.live_experiments import LiveExperiments

PRELOADED_S = 86_400.0
"""Seconds that a preloaded bundle stays loaded while no experiment uses it."""
RETRY_S = 15.0
"""Seconds between two attempts to load a bundle."""

_log = logging.getLogger(__name__)


class Preloader:
    """Loads bundles ahead, for one replica. One thread at a time may call `preload`."""

    def __init__(self, live_experiments: LiveExperiments, notices: Notices):
        """Load the bundles that `notices` names, and let `live_experiments` keep them."""
        self._live_experiments = live_experiments
        self._notices = notices
        self._next_attempts: dict[str, float] = {}
        """Reference of a bundle -> moment of the next attempt to load it, in monotonic seconds."""

    def preload(self) -> None:
        """Begin to load the bundles that were asked for, and drop those that were asked for too long ago.

        Each is loaded in a thread of its own. Raises StoreError if the store cannot be read.
        """
        live_experiments = self._live_experiments
        # Before the notices are read, because others load what a notice names already.
        loaded_references = list(live_experiments.models)
        wanted_ahead = self._notices.preloads(time.time() - PRELOADED_S)
        live_experiments.drop_models(reference for reference in loaded_references if reference not in wanted_ahead)
        now = time.monotonic()
        for reference in wanted_ahead:
            if reference not in live_experiments.models and self._next_attempts.get(reference, 0.0) <= now:
                self._next_attempts[reference] = now + RETRY_S
                threading.Thread(target=self._load, args=(reference,), name="load-model", daemon=True).start()

    def _load(self, reference: str) -> None:
        try:
            self._live_experiments.keep_model(reference, self._live_experiments.bundles.load(reference))
        except MarlRayError as error:
            _log.error("a bundle is not loaded ahead: %s", error)
        except Exception:
            _log.exception("bundle %s is not loaded ahead", reference)
