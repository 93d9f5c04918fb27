"""A name under a storage is of one run or of one sweep, and the other kind is refused before anything is written."""

import json
from pathlib import Path

import pytest
from toy_runs.runs import config
from toy_runs.sweeps import RUN, ToySweep

import marl_ray as api
from marl_ray.cli import main
from marl_ray.cli.training.quickstart import try_it
from marl_ray.cli.training.train import demo
from marl_ray.errors import MarlRayError
from marl_ray.training.run_folder.record import record_of, write_record
from marl_ray.tuning.records_file import RecordsFile
from marl_ray.tuning.running.driver import check_sweep


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses its arguments."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_may_not_have_the_name_of_a_sweep(tmp_path, capsys):
    sweep = ToySweep(tmp_path, "taken")
    RecordsFile(sweep.folder, sweep.records).save()
    run, before = config("name=taken", f"storage={tmp_path}"), files(tmp_path)
    (path := tmp_path / "run.yaml").write_text(json.dumps(run.as_given()))
    line = f"name: 'taken' is a sweep under '{tmp_path}'; choose another name"
    for further in (["--dry-run"], [], ["resume_from=other"]):
        assert refusal(capsys, "train", str(path), *further) == f"marl-ray: {line}"
    with pytest.raises(MarlRayError) as error:
        api.train(run.as_given())
    assert str(error.value) == line
    path.unlink()
    assert files(tmp_path) == before
    check_sweep(sweep.config)  # and the sweep itself may continue


def test_a_sweep_may_not_have_the_name_of_a_run(tmp_path, capsys):
    run = config("name=taken", f"storage={tmp_path}")
    write_record(run, record_of(run))
    before, space = files(tmp_path), {"hyper.lr": {"grid": [0.1, 0.2]}}
    sweep = {"name": "taken", "run": RUN, "space": space, "storage": str(tmp_path)}
    (path := tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    line = f"name: 'taken' is a run under '{tmp_path}'; choose another name"
    for further in (["--dry-run"], []):
        assert refusal(capsys, "sweep", str(path), *further) == f"marl-ray: {line}"
    with pytest.raises(MarlRayError) as error:
        api.sweep(sweep)
    assert str(error.value) == line
    path.unlink()
    assert files(tmp_path) == before


def test_neither_may_have_the_folder_of_something_else(tmp_path):
    (tmp_path / "try" / "20261126-120000").mkdir(parents=True)
    (tmp_path / "mlflow.db").write_bytes(b"")
    for name, line in (
        ("try", f"'try' under '{tmp_path}' is the folder of something else than a {{}}, with 20261126-120000; choose"),
        ("mlflow.db", f"'mlflow.db' is a file under '{tmp_path}'; choose another name"),
    ):
        with pytest.raises(MarlRayError, match=line.format("run")):
            record_of(config(f"name={name}", f"storage={tmp_path}"))
        with pytest.raises(MarlRayError, match=line.format("sweep")):
            check_sweep(ToySweep(tmp_path, name).config)
    record_of(config("name=new", f"storage={tmp_path}"))


@pytest.mark.parametrize("command", [try_it, demo])
def test_the_first_steps_may_not_have_the_folder_of_a_run(command, tmp_path):
    run = config("name=taken", f"storage={tmp_path}")
    write_record(run, record_of(run))
    before = files(tmp_path)
    with pytest.raises(
        MarlRayError, match=f"^--folder: '{tmp_path}/taken' is that of a run or a sweep; expected another"
    ):
        command(folder=tmp_path / "taken")
    with pytest.raises(MarlRayError, match=r"^--folder: .*run.json.* cannot be made: Not a directory"):
        command(folder=tmp_path / "taken" / "run.json")
    assert files(tmp_path) == before
