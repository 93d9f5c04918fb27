"""Runs of `marl-ray try`, which lie in a folder of their own below the usual storage: how newcomers find them."""

import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes.command_line import marl_ray
from toy_runs.runs import config

from marl_ray.cli.training.runs import list_runs, show_run
from marl_ray.config import resolve_tracking_uri
from marl_ray.errors import MarlRayError
from marl_ray.first_steps.quickstart import RUN, next_command_lines
from marl_ray.runs.stored import find_run
from marl_ray.training.run_folder.record import record_of, write_record


def test_runs_that_lie_deeper_are_told_of_where_there_are_none(tmp_path, capsys):
    place = tmp_path / ".try" / "20261126-120000"
    run_config = config("name=try", f"storage={place}")
    write_record(run_config, record_of(run_config))
    list_runs(str(tmp_path))
    hint = f"there are some in {place}: name that storage"
    assert capsys.readouterr().out == f"no runs under {str(tmp_path)!r}; {hint}\n"
    with pytest.raises(MarlRayError, match=f"^run 'try' is not under '{tmp_path}'; {hint}$"):
        find_run("try", str(tmp_path))
    with pytest.raises(MarlRayError, match=r"is not under '.*'; there is no run$"):
        find_run("try", str(tmp_path / "none"))


def test_the_search_for_deeper_runs_passes_over_folders_that_vanish(tmp_path):
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            folder = tmp_path / "a" / "b" / "c"
            folder.mkdir(parents=True)
            (folder / "run.json").touch()
            shutil.rmtree(tmp_path / "a")

    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(come_and_go)
        try:
            for _ in range(300):
                list_runs(str(tmp_path))
        finally:
            is_over.set()
        going.result(60)


def test_the_first_look_ends_with_commands_that_show_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = list(next_command_lines(str(tmp_path / "runs" / "try" / "now")))
    assert "  marl-ray runs ls --storage runs/try/now" in lines
    assert f"  marl-ray runs show {RUN['name']} --storage runs/try/now" in lines


def test_a_model_is_shown_with_its_registry_where_that_is_not_the_default_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for storage, registry in (
        ("runs", ""),
        ("runs/try/now", f" --tracking-uri sqlite:///{tmp_path}/runs/try/now/mlflow.db"),
    ):
        run_config = config("name=try", f"storage={storage}")
        result = {"model": "models:/try/1", "tracking_uri": resolve_tracking_uri(storage=storage)}
        finished = {"total_steps": run_config.train.total_steps, "result": result, "score": None}
        write_record(run_config, record_of(run_config) | {"finished": finished})
        show_run("try", storage)
        assert f"  model       models:/try/1{registry}\n" in capsys.readouterr().out


def test_a_sweep_whose_record_is_cut_is_named_with_its_file(tmp_path):
    path = tmp_path / "many" / "sweep.json"
    path.parent.mkdir()
    path.write_text('{"trials": [')
    for command in (["show", "many"], ["rm", "many", "--yes"]):
        done = marl_ray("runs", *command, "--storage", tmp_path)
        assert re.fullmatch(f"marl-ray: {path} is not the record of a sweep: .*\n", done.stderr), command
