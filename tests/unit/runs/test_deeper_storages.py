"""Runs of `marl-ray try`, which lie in a folder of their own below the usual storage: how newcomers find them."""

import pytest
from toy_runs.runs import config

from marl_ray.cli.training.runs import list_runs
from marl_ray.errors import MarlRayError
from marl_ray.first_steps.quickstart import RUN, next_lines
from marl_ray.runs.stored import find_run
from marl_ray.training.run_folder.record import record_of, write_record


def test_runs_that_lie_deeper_are_told_of_where_there_are_none(tmp_path, capsys):
    place = tmp_path / "try" / "20261126-120000"
    run_config = config("name=try", f"storage={place}")
    write_record(run_config, record_of(run_config))
    list_runs(str(tmp_path))
    hint = f"there are in {place}: give --storage {place}"
    assert capsys.readouterr().out == f"no runs under {str(tmp_path)!r}; {hint}\n"
    with pytest.raises(MarlRayError, match=f"^run 'try' is not under '{tmp_path}'; {hint}$"):
        find_run("try", str(tmp_path))
    with pytest.raises(MarlRayError, match=r"is not under '.*'; there is no run$"):
        find_run("try", str(tmp_path / "none"))


def test_the_first_look_ends_with_commands_that_show_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = list(next_lines(str(tmp_path / "runs" / "try" / "now")))
    assert "  marl-ray runs ls --storage runs/try/now" in lines
    assert f"  marl-ray runs show {RUN['name']} --storage runs/try/now" in lines
