"""From a sweep's folder to the eyes of a person, and to an experiment. Screenshots stay in tests/artefacts/."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import mlflow
import pytest
import uvicorn
from processes.command_line import keys_of
from servers.chromium import WAIT_S, browser, keep, look
from toy_runs.sweeps import ToySweep, finished_sweep
from toy_serving.gateways import make_bundle, write_keys

from marl_ray.cli import main
from marl_ray.config import GatewayConfig, parse_config
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.client.requests import request_json
from marl_ray.tuning.reporting.mlflow_runs import SweepMlflowRuns
from marl_ray.tuning.reporting.report import write_report

__all__ = ["browser"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a finished sweep."""
    sweep = finished_sweep(tmp_path_factory.mktemp("sweep"))
    return write_report(sweep.end(), sweep.records)


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)]
)
def test_the_report_shows_all_its_drawings_at_any_width_in_light_and_dark(browser, report, name, width, dark):
    look(browser, width, dark)
    browser.get(f"file://{report}")
    keep(browser, f"sweep-report-{name}")

    def all_of(selector: str) -> list[Any]:
        return browser.find_elements("css selector", selector)

    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    (chart,) = (chart for chart in all_of("svg.chart") if chart.is_displayed())
    lines = [
        line for line in chart.find_elements("css selector", "path.line") if "other" not in line.get_attribute("class")
    ]
    assert len({line.value_of_css_property("stroke") for line in lines}) == 6
    assert max(line.size["width"] for line in lines) > 0.75 * chart.size["width"]
    assert all(band.size["height"] > 0 for band in chart.find_elements("css selector", "path.band"))
    (winner,) = all_of("tr.won")
    assert winner.is_displayed() and "best" in winner.text
    cells = all_of("table.matrix td.good, table.matrix td.bad")
    assert len({cell.value_of_css_property("background-color") for cell in cells}) > 5
    threads = all_of("path.thread")
    assert len({thread.value_of_css_property("stroke") for thread in threads}) > 5
    assert all(thread.size["width"] > 400 for thread in threads)
    widths = [bar.size["width"] for bar in all_of("div.bar i")]
    assert widths == sorted(widths, reverse=True) and widths[0] > 0
    shade = browser.find_element("tag name", "body").value_of_css_property("background-color")
    assert (shade == "rgba(255, 255, 255, 1)") != dark
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    requests = [entry["message"] for entry in browser.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert all("file://" in message or "data:" in message for message in requests)


class Served:
    """A gateway of this process over HTTP; `--url` is its address."""

    def __init__(self, config: GatewayConfig):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(Gateway(config), log_level="warning", lifespan="on"))
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],), daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        self.listening.close()
        assert not self.thread.is_alive()


def gateway_of(folder: Path, experiments: list[dict[str, Any]]) -> GatewayConfig:
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": str(folder / "spool")}
    keys = write_keys(folder / "keys.yaml", ada=("admin",))
    uri = f"sqlite:///{folder}/mlflow.db"
    return parse_config(GatewayConfig, where | {"experiments": experiments, "api_keys": keys, "tracking_uri": uri})


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(list(arguments))
    return int(done.value.code or 0)


def register(storage: Path) -> ToySweep:
    """A sweep whose winner's bundle is in MLflow, registered as a sweep's driver does it."""
    sweep = ToySweep(storage, seeds=1)
    values = {"algorithm": "ippo", "hyper.lr": 0.001, "hyper.entropy_coef": 0.01}
    sweep.train(sweep.add(values), 1.0)
    tracker = SweepMlflowRuns(sweep.config, sweep.records)
    bundle = Path(make_bundle(storage / "bundles", 4))
    folder = sweep.end(model=tracker.register(sweep.records.trials[0], bundle))
    write_report(folder, sweep.records)
    tracker.report(folder.read("report.html"))
    tracker.close("finished")
    return sweep


def deploy_winner(served: Served, storage: Path, *more: str) -> int:
    """The exit status of the command that deploys the winner of the storage's sweep."""
    return command("deploy", "--from-sweep", f"{storage}/toy", "--url", served.url, *more)


@pytest.fixture
def production(tmp_path, monkeypatch) -> Iterator[tuple[Served, Path]]:
    """A gateway with one model in production, and the storage of a sweep whose winner is registered."""
    monkeypatch.setenv("MARL_RAY_API_KEY", "ada")
    register(tmp_path)
    alone = {"name": "grid", "arms": {"production": {"bundle": make_bundle(tmp_path / "old", 1)}}}
    with Served(gateway_of(tmp_path, [alone])) as served:
        yield served, tmp_path


def test_a_winner_is_registered_beside_the_report(tmp_path):
    records = register(tmp_path).records
    assert records.winner_model == "models:/toy/1"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert [file.path for file in client.list_artifacts(records.mlflow_run_id)] == ["bundles", "report.html"]


def test_an_endpoint_without_a_model_in_production_is_told_how_to_get_one(production, capsys):
    assert deploy_winner(*production, "--endpoint", "other") == 2
    message = capsys.readouterr().err
    assert "endpoint 'other' has no model in production to compare with; deploy one first: " in message
    assert "marl-ray deploy models:/toy/1 --endpoint other" in message and message.count("\n") == 1


def test_a_deployed_winner_is_the_candidate_against_what_is_in_production(production, capsys):
    served, storage = production
    assert deploy_winner(served, storage) == 0
    assert capsys.readouterr().out.startswith("grid-2: running, gradual stage 1")
    report = request_json(served.url, "/v1/experiments/grid-2")
    candidate = report["arms"]["candidate"]
    assert report["control"] == "production"
    assert candidate["bundle"] == "models:/toy/1"
    assert candidate["digest"] == load_bundle("models:/toy/1", f"sqlite:///{storage}/mlflow.db").digest
    audit = request_json(served.url, "/v1/experiments/grid-2/audit")["audit"]
    assert "winner of sweep toy: trial 0000 (algorithm=ippo lr=0.001 entropy_coef=0.01)" in str(audit)
    # While it runs, no other takes its place.
    assert deploy_winner(served, storage) == 2
    refusal = "endpoint 'grid' still has experiment 'grid-2' (running); promote, roll back or stop that one first"
    assert refusal in capsys.readouterr().err


def test_commands_about_a_deployed_experiment_print_their_documents(production, capsys):
    served, storage = production
    assert deploy_winner(served, storage) == 0
    capsys.readouterr()
    for words in ("status grid-2", "ls", "audit grid-2"):
        assert command("experiment", *words.split(), "--json", "--url", served.url) == 0
        document = json.loads(capsys.readouterr().out)
        for part in document if isinstance(document, list) else [document]:
            assert keys_of(f"experiment {words.split()[0]}") <= set(part)
    assert command("experiment", "status", "gird-2", "--url", served.url) == 2
    assert "unknown experiment 'gird-2'; did you mean grid-2" in capsys.readouterr().err


def test_what_cannot_be_deployed_is_one_line(tmp_path, monkeypatch, capsys):
    ToySweep(tmp_path, "empty").end()
    finished_sweep(tmp_path, trials=2).end(model="")
    for arguments, message in (
        ([], "deploy: expected either BUNDLE or --from-sweep SWEEP"),
        (["models:/x/1", "--from-sweep", "toy"], "deploy: expected either BUNDLE or --from-sweep SWEEP"),
        (["--from-sweep", f"{tmp_path}/none"], "expected a sweep's folder or name, but there is no"),
        (["--from-sweep", f"{tmp_path}/empty"], "sweep 'empty' has no winner: no trial has a result"),
        (["--from-sweep", f"{tmp_path}/toy"], "is not registered in MLflow"),
    ):
        assert command("deploy", *arguments) == 2
        output = capsys.readouterr().err
        assert message in output and output.count("\n") == 1
    monkeypatch.setenv("MARL_RAY_API_KEY", "ada")
    (tmp_path / "gateway").mkdir()
    register(tmp_path / "gateway")
    with Served(gateway_of(tmp_path / "gateway", [])) as served:
        assert command("deploy", "--from-sweep", f"{tmp_path}/gateway/toy", "--url", served.url) == 2
    output = capsys.readouterr().err
    assert f"gateway {served.url} has no model in production to compare with" in output and output.count("\n") == 1
