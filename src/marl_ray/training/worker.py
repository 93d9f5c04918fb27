"""One worker process of a training run on Ray Train: it runs the loop, and rank 0 writes the run's journal."""

import contextlib
import os
import traceback
from pathlib import Path
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.training.journal.writer import Journal
from marl_ray.training.run_folder.lease import Disowned, check_owned
from marl_ray.training.run_folder.record import filesystem_of, storage_of, work_in, write_traceback
from marl_ray.training.surroundings.full_disk import disk_full

REFUSED = "refused"
"""Key under which a worker returns the message of an error that would come again after every restart."""
STOPPED = "stopped"
"""Key of a worker's return value for the error message of a run whose numbers stopped being finite."""


def worker(payload: dict[Any, Any]) -> Any:
    """Train in one worker process; Ray Train calls this function in each."""
    import ray.train
    import ray.train.torch

    from marl_ray.policies.engines.vllm_process.process import EngineRefused
    from marl_ray.training.checkpoint import iteration_of
    from marl_ray.training.errors import Diverged
    from marl_ray.training.loop import run_worker
    from marl_ray.training.tracking.machine_readings import MachineReadings

    os.environ[TRACKING_URI] = payload["tracking_uri"]  # a worker looks up bundles in the registry too
    work_in(payload["folder"])
    config = RunConfig.model_validate(payload["config"])
    rank = ray.train.get_context().get_world_rank()
    system = MachineReadings()

    def emit(metrics: dict[str, float]) -> None:
        journal.row(metrics | system.read())

    def check_owner() -> None:
        filesystem, path = filesystem_of(config)
        check_owned(filesystem, path, payload["lease"], f"run {config.name!r}")

    def report(folder: Path, metrics: dict[str, float]) -> None:
        if rank == 0:
            check_owner()  # the driver may sleep while another owner's workers write to the same folder
        journal.flush()  # steps up to this checkpoint are not played again after a failure, so their rows must not be lost
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    try:
        check_owner()
    except Disowned as error:
        return {REFUSED: str(error)}
    journal = Journal(*filesystem_of(config), rank)
    latest, origin = ray.train.get_checkpoint(), payload["origin"]
    if latest is not None:
        origin = None
    elif origin is not None:
        latest = ray.train.Checkpoint(origin)
    with latest.as_directory() if latest else contextlib.nullcontext() as resume_from:
        try:
            own = Path(resume_from) if resume_from and origin is None else None
            journal.begin(iteration_of(own) if own else None)
            return run_worker(
                config,
                ray.train.torch.get_device(),
                Path(resume_from) if resume_from else None,
                emit=emit,
                report=report,
                run_id=payload["run_id"],
                show=journal.transcripts,
                engine_of=_engine_actors(config) if config.engine_actors else None,
                phase=journal.phase,
                origin=origin,
            )
        except Diverged as error:  # all workers raise it together, and would raise it again after every restart
            return {STOPPED: str(error)}
        except EngineRefused as error:
            return {REFUSED: str(error)}
        except Exception as error:
            write_traceback(config, f"worker-{rank}", traceback.format_exc())
            if full := disk_full(error, storage_of(config)):
                raise full from error
            raise
        finally:
            with contextlib.suppress(OSError):  # rows after the last checkpoint are played again
                journal.close()


def _engine_actors(config: RunConfig) -> Any:
    """The function that makes a policy's engine: actors where vLLM samples, and else one in the worker's process."""
    from marl_ray.policies.engines.sampler import make_engine
    from marl_ray.training.team.engine_actors import EngineActors

    def engine_of(name: str, policy: Any) -> Any:
        return EngineActors(config, name, policy) if policy.generation.engine == "vllm" else make_engine(policy)

    return engine_of
