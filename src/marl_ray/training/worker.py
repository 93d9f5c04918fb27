"""One worker process of a training run on Ray Train: it runs the loop, and rank 0 writes the run's journal."""

import contextlib
import math
import os
import traceback
from functools import partial
from typing import Any

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.writer import Journal
from marl_ray.training.machines.full_disk import disk_full
from marl_ray.training.run_folder.bundle_link import link_bundle
from marl_ray.training.run_folder.lease import Disowned, check_owned
from marl_ray.training.run_folder.record import filesystem_of, identity_hash, storage_of, work_in, write_traceback
from marl_ray.training.run_folder.temporary_files import remove_temporary

REFUSED = "refused"
"""Key under which a worker returns the message of an error that would come again after every restart."""
STOPPED = "stopped"
"""Key of a worker's return value for the error message of a run whose numbers stopped being finite."""


def worker(payload: dict[Any, Any]) -> Any:
    """Train in one worker process; Ray Train calls this function in each."""
    import ray.train
    import ray.train.torch

    from marl_ray.policies.engines.vllm_process.process import EngineRefused
    from marl_ray.training.checkpoints.index import attempt_number, checkpoint_name, own_checkpoints
    from marl_ray.training.checkpoints.loading import Unreadable
    from marl_ray.training.checkpoints.manifest import withdraw
    from marl_ray.training.checkpoints.storage import Unwritable
    from marl_ray.training.collectives import from_first
    from marl_ray.training.errors import Diverged
    from marl_ray.training.loop.listeners import Listeners
    from marl_ray.training.loop.start import RunStart
    from marl_ray.training.loop.worker_loop import Keeping, run_worker
    from marl_ray.training.tracking.machine_readings import MachineReadings

    os.environ[TRACKING_URI] = payload["tracking_uri"]  # a worker looks up bundles in the registry too
    work_in(payload["folder"])
    config = RunConfig.model_validate(payload["config"])
    rank = ray.train.get_context().get_world_rank()
    system = MachineReadings()

    def row(metrics: dict[str, float]) -> None:
        journal.row(metrics | system.read())

    def check_owner() -> None:
        check_owned(folder.filesystem, folder.path, payload["lease"], f"run {config.name!r}")

    def begin(after: int | None) -> None:
        journal.begin(after)
        for path, line in damaged if rank == 0 else ():  # now that there is another checkpoint to go on from
            journal.say(line)
            withdraw(StoredFolder(folder.filesystem, path))

    def before() -> None:
        if rank == 0:
            check_owner()  # the driver may sleep while another owner's workers write to the same folder
        journal.flush()  # steps up to this checkpoint are not played again after a failure, so their rows must not be lost

    def own_places() -> tuple[list[str], str]:
        """Paths of the run's checkpoints, and why none can be used where other runs' are all that is there."""
        try:
            return [place.path for place in own_checkpoints(folder, identity_hash(config), journal.say)], ""
        except MarlRayError as error:
            return [], f"no checkpoint can be used: {error}"

    folder, origin = StoredFolder(*filesystem_of(config)), payload["origin"]
    try:
        check_owner()
    except Disowned as error:
        return {REFUSED: str(error)}
    if rank == 0:
        remove_temporary(*folder)
    journal = Journal(folder.filesystem, folder.path, rank)
    try:
        # Rank 0 decides for all: a storage may show others an older list.
        own, refused, attempt = from_first(lambda: (*own_places(), attempt_number(folder)))
        if refused:
            return {REFUSED: refused}
        best_left, damaged = from_first(lambda: _best_left(folder))
        tidy = partial(_tidy, config, folder, attempt)
        places = [StoredFolder(folder.filesystem, path) for path in reversed(own)]
        if places:
            origin = None
        elif origin is not None:
            places = [StoredFolder(*fs.FileSystem.from_uri(origin))]
        last = run_worker(
            config,
            ray.train.torch.get_device(),
            RunStart(places, origin, payload["run_id"], best_left=best_left),
            Listeners(row, journal.transcripts, journal.phase, begin, journal.say),
            Keeping(lambda iteration: folder / checkpoint_name(iteration, attempt), before, tidy),
            _engine_actors(config) if config.engine_actors else None,
        )
        if rank == 0:
            tidy()  # again, for a worker that was killed after the last checkpoint and before this
        return last
    except Diverged as error:  # all workers raise it together, and would raise it again after every restart
        return {STOPPED: str(error)}
    except (EngineRefused, Unwritable, Unreadable) as error:
        return {REFUSED: str(error)}
    except Exception as error:
        write_traceback(config, f"worker-{rank}", traceback.format_exc())
        if full := disk_full(error, storage_of(config)):
            raise full from error
        raise
    finally:
        with contextlib.suppress(OSError):  # rows after the last checkpoint are played again
            journal.close()


def _best_left(folder: StoredFolder) -> tuple[float, list[tuple[str, str]]]:
    """The score of the best checkpoint whose bundle is there, the least number if there is none; and the paths of those
    whose bundle is not, each with a line about it. Whoever loads the newest checkpoint looks after that one."""
    from marl_ray.training.checkpoints.index import best_whole, published

    checkpoints = published(folder)
    try:
        chosen, damaged = best_whole(checkpoints, sizes=True)
    except OSError:  # storage that does not answer has lost nothing
        return math.inf, []
    lines = [(place.path, line) for place, line in damaged if place != checkpoints[-1].place]
    return -math.inf if chosen is None else chosen.manifest.score, lines


def _tidy(config: RunConfig, folder: StoredFolder, attempt: int) -> None:
    """Let the run's link lead to the best bundle so far, and remove the checkpoints that are not kept."""
    from marl_ray.training.checkpoints.index import best, published, tidy

    with contextlib.suppress(OSError):  # a run that cannot make links, or not delete, goes on
        chosen = best(published(folder))
        if chosen is not None:
            link_bundle(*folder, chosen.name, f"{storage_of(config)}/{config.name}")
        tidy(folder, config.checkpoint.newest, config.checkpoint.interval, attempt)


def _engine_actors(config: RunConfig) -> Any:
    """The function that makes a policy's engine: actors where vLLM samples, and else one in the worker's process."""
    from marl_ray.policies.engines.sampler import make_engine
    from marl_ray.training.team.engine_actors import EngineActors

    def engine_of(name: str, policy: Any) -> Any:
        return EngineActors(config, name, policy) if policy.generation.engine == "vllm" else make_engine(policy)

    return engine_of
