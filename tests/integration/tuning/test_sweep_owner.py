"""Two sweeps of one name, and a sweep whose folder was copied."""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from toy_runs.sweeps import ToySweep
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.ownership import owners
from marl_ray.stored_files.ownership.lease import Lease, LeaseLostError
from marl_ray.stored_files.ownership.owners import owner_file
from marl_ray.tuning.running.driver import run_sweep

LOCAL = fs.LocalFileSystem()


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    raise AssertionError("the sweep must not begin")
    yield


def test_a_second_sweep_of_a_name_is_refused_before_it_writes(tmp_path):
    sweep = ToySweep(tmp_path).config
    folder = str(tmp_path / sweep.name)
    with Lease(LOCAL, folder, "it"):
        with pytest.raises(MarlRayError, match=rf"name: sweep '{sweep.name}' is owned by process {os.getpid()} of "):
            run_sweep(sweep, cluster=nothing_runs)
        assert not (tmp_path / "mlflow.db").exists()
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} <= {"owner"}


def test_a_sweep_whose_name_was_taken_writes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "BEAT_S", 0.05)
    sweep = ToySweep(tmp_path)
    sweep.add({"algorithm": "ippo", "hyper.lr": 0.001}, "running")
    sweep.end("running")
    taken: list[dict[Path, bytes]] = []
    others = set(threading.enumerate())

    def files() -> dict[Path, bytes]:
        """Those that only the owner may write; MLflow's mark may be of a call that had begun before."""
        paths = (path for path in (tmp_path / "toy").rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths if path.parent.name not in ("owner", "sinks")}

    def names() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - others}

    @contextlib.contextmanager
    def taking() -> Iterator[None]:
        Path(owner_file(str(tmp_path / "toy"), 2)).write_text("{}")
        taken.append(files())
        until(lambda: "lease" not in names(), "the end of the lease's thread")
        raise RuntimeError("what a sweep meets whose trials were ended")
        yield

    with pytest.raises(LeaseLostError, match="sweep 'toy' is now owned by another process"):
        run_sweep(sweep.config, cluster=taking)
    assert taken == [files()] and taken[0]
    until(lambda: "sink mlflow" not in names(), "the end of calls of MLflow")


def test_a_copied_sweep_goes_on_where_it_lies_now(tmp_path):
    sweep = ToySweep(tmp_path / "old", budget={"trials": 2})
    for algorithm, level in (("ippo", 1.0), ("mappo", 2.0)):
        record = sweep.add({"algorithm": algorithm, "hyper.lr": 0.001, "hyper.entropy_coef": 0.01})
        sweep.train(record, level, steps=2000)
    sweep.end()
    shutil.copytree(tmp_path / "old" / "toy", tmp_path / "new" / "toy")
    config = sweep.config.model_copy(update={"storage": str(tmp_path / "new")})
    outcome = run_sweep(config, cluster=nothing_runs)
    assert outcome.folder == f"{tmp_path}/new/toy" and outcome.report.startswith(outcome.folder)
    assert outcome.records.winner == 1 and len(outcome.records.trials) == 2
    assert not (tmp_path / "old" / "toy" / "report.html").exists()


def test_damaged_rows_of_the_winner_end_no_sweep(tmp_path, capsys):
    sweep = ToySweep(tmp_path, budget={"trials": 2})
    for algorithm, level in (("ippo", 1.0), ("mappo", 2.0)):
        record = sweep.add({"algorithm": algorithm, "hyper.lr": 0.001, "hyper.entropy_coef": 0.01})
        sweep.train(record, level, steps=2000)
    sweep.end()
    path = tmp_path / "toy" / "trials" / "0001" / "rows.jsonl"
    rows = path.read_text()
    path.write_text(f"{{{rows}")
    records = run_sweep(sweep.config, cluster=nothing_runs).records
    assert (records.status, records.winner) == ("finished", 1)
    assert (
        f"no bundle of the winner, trial 0001, can be chosen: {path}, line 1: expected a row" in capsys.readouterr().err
    )
    path.write_text(rows)
    assert run_sweep(sweep.config, cluster=nothing_runs).records.winner_seed is not None
