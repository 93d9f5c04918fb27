"""Two drivers of one name, of a run or of a sweep.

The second is refused with the address and the age of the first, on local storage and on an object store over HTTP.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from servers.object_store import object_store
from toy_runs.runs import config
from toy_runs.sweeps import ToySweep

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.stored_files.ownership.owners import own_address
from marl_ray.training import driver
from marl_ray.training.driver import train
from marl_ray.training.run_folder.record import filesystem_of
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.running.driver import run_sweep


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "runs")
    else:
        with object_store(f"bucket-{time.time_ns()}") as uri:
            yield f"{uri}/runs"


@contextlib.contextmanager
def own_while_refused(kind: str, filesystem: fs.FileSystem, folder: str) -> Iterator[None]:
    """Own the folder while the block is refused; the block writes nothing."""
    with Lease(filesystem, folder, f"{kind} 'toy'"):
        with pytest.raises(MarlRayError) as caught:
            yield
        address = f" ({own_address()})" if own_address() else ""
        assert f"name: {kind} 'toy' is owned by process {os.getpid()} of {os.uname().nodename}{address}, whose" in str(
            caught.value
        )
        assert ", whose last beat is " in str(caught.value) and " s old; choose another name, or, " in str(caught.value)
        infos = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
        assert [info.base_name for info in infos if info.type == fs.FileType.File] == ["1.json"]


def test_a_second_driver_of_a_run_is_refused(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "check_capacity", lambda config: False)  # there is no Ray
    run = config(f"storage={storage}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    with own_while_refused("run", *filesystem_of(run)):
        train(run)
    assert not (tmp_path / "mlflow.db").exists()


def test_a_second_driver_of_a_sweep_is_refused(storage, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    sweep = ToySweep(tmp_path).config.model_copy(update={"storage": storage})
    folder = Folder(storage, sweep.name)

    @contextlib.contextmanager
    def nothing_runs() -> Iterator[None]:
        raise AssertionError("the sweep must not begin")
        yield

    with own_while_refused("sweep", folder.filesystem, folder.path):
        run_sweep(sweep, cluster=nothing_runs)
    assert not (tmp_path / "mlflow.db").exists()
