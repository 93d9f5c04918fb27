"""Metrics in TensorBoard and Weights & Biases, and what the machine is doing."""

import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import until

from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.training.tracking.sinks import WeightsAndBiases, check_sinks, open_sink
from marl_ray.training.tracking.system_metrics import SystemMetrics

ROWS = [{"steps": 64, "return": 0.5, "loss": math.nan}, {"steps": 128, "return": 0.75, "loss": 2.0}]


def config_of(folder: Path | str, *also: str) -> RunConfig:
    data = {"name": "run", "env": {"id": "budget_dag"}, "storage": str(folder), "tracking": {"also": also}}
    return parse_config(RunConfig, data)


def test_tensorboard_reads_what_was_logged(tmp_path):
    for rows in (ROWS[:1], ROWS[1:]):  # a run that is resumed writes on
        sink = open_sink(config_of(tmp_path, "tensorboard"), "id", "tensorboard")
        sink.log(rows)
        sink.end("FINISHED")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("return")] == [(64, 0.5), (128, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(128, 2.0)]


@pytest.mark.long
def test_wandb_writes_its_files_without_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for place in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "home"))
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "bundle.json").write_text("{}")
    config = config_of(tmp_path, "wandb")
    check_sinks(config)
    sink = open_sink(config, "0123abc", "wandb")
    sink.log(ROWS)
    assert isinstance(sink, WeightsAndBiases)
    sink.keep_bundle(bundle, "models:/run/1", "0123")
    (bundle / "bundle.json").unlink()  # the driver's copy is temporary
    sink.end("FINISHED")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-0123abc.wandb")
    expected = (b"return", b"run-bundle", b"models:/run/1", b"bundle.json", b"group", b"mappo", b"budget_dag")

    def missing() -> list[bytes]:
        return [part for part in expected if part not in file.read_bytes()]

    until(lambda: not missing(), "W&B's own process to write the file", details=missing)
    assert sink.run.group == "marl-ray" and set(sink.run.tags or ()) == {"mappo", "budget_dag"}


def test_what_cannot_work_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MarlRayError, match=r"^tracking.also: wandb expects WANDB_API_KEY"):
        check_sinks(config_of(tmp_path, "wandb"))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_sinks(config_of(tmp_path, "wandb"))
    with pytest.raises(MarlRayError, match=r"^tracking.also: tensorboard writes to a local folder"):
        check_sinks(config_of("hdfs://there/runs", "tensorboard"))


def test_a_sink_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(MarlRayError, match=r"^tracking.also: tensorboard cannot be used: "):
        open_sink(config_of(tmp_path, "tensorboard"), "id", "tensorboard")


def test_the_machine_is_read_now_and_then():
    system, end = SystemMetrics(), time.process_time() + 0.2
    while time.process_time() < end:
        pass  # this process keeps a core busy
    readings = system.read()
    assert readings["system/memory_gib"] > readings["system/process_memory_gib"] > 0
    assert 0 < readings["system/cpu_percent"] <= 100 and readings["system/process_cpu_percent"] > 1
    assert system.read() == {}
