"""Bad inputs are answered before, or instead of, any submission."""

import http.server
import json
import socket
import threading
import time

import pytest
from servers.http_server import serving_http

from marl_ray.cli.cluster import PRINTER
from marl_ray.cluster import jobs
from marl_ray.errors import MarlRayError

NOBODY, NOWHERE = "http://127.0.0.1:1", "http://no-such-host.invalid:8265"
"""Addresses at which nobody answers, here and elsewhere: another error comes before the cluster is asked."""
GOOD = "name: run\nenv: {id: MultiGrid-Empty-5x5-v0}\nstorage: /data/runs\n"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (GOOD, ["hyper.lrr=1"], "unknown key 'hyper.lrr'"),
        (GOOD + "nmae: x\n", [], "unknown key 'nmae'"),
        (GOOD, ["lr"], "override 'lr': expected dotted.key=value"),
        (GOOD, ["storage=runs"], "storage='runs' is relative to the job's temporary folder"),
        (GOOD, ["tracking.uri=sqlite:///mlflow.db"], "tracking.uri='sqlite:///mlflow.db' is relative"),
        (GOOD, ["team.shared.bundle=bundles/a"], "team.shared.bundle='bundles/a' is relative"),
    ],
)
def test_a_bad_config_is_refused_before_the_cluster_is_asked(tmp_path, text, overrides, message):
    config = tmp_path / "run.yaml"
    config.write_text(text)
    with pytest.raises(MarlRayError) as error:
        jobs.submit("train", config, overrides, address=NOWHERE, listener=PRINTER)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("storage", ["/data/runs", "s3://bucket/runs"])
@pytest.mark.parametrize("bundle", ["/data/b", "models:/team/3", "s3://bucket/b"])
def test_absolute_paths_and_uris_pass(tmp_path, storage, bundle):
    config = tmp_path / "run.yaml"
    config.write_text(GOOD)
    with pytest.raises(MarlRayError, match="no Ray dashboard answers"):  # so the config has passed
        jobs.submit(
            "train", config, [f"storage={storage}", f"team.shared.bundle={bundle}"], address=NOBODY, listener=PRINTER
        )


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(MarlRayError, match=r"none\.yaml"):
        jobs.submit("train", tmp_path / "none.yaml", address=NOBODY, listener=PRINTER)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "ray://head:10001", "auto", ""])
def test_an_address_that_is_no_url(address):
    with pytest.raises(MarlRayError, match=r"--address .*: expected the dashboard's URL"):
        jobs.connect(address)


def test_an_address_that_cannot_be_parsed_is_one_line(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(GOOD)
    with pytest.raises(MarlRayError, match=r"^--address http://\[: no Ray dashboard answers") as error:
        jobs.submit("train", config, address="http://[", listener=PRINTER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("address", [NOBODY, NOWHERE])
def test_an_unreachable_address_is_answered_within_ten_seconds(address):
    started = time.monotonic()
    with pytest.raises(MarlRayError, match=r"--address .*: no Ray dashboard answers") as error:
        jobs.connect(address)
    assert time.monotonic() - started < 10
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"", "no answer within 0.3 s"), (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "no Ray dashboard answers")],
)
def test_a_server_that_is_silent_or_something_else(answer, message, monkeypatch):
    monkeypatch.setattr(jobs, "READ_S", 0.3)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            if answer:
                connection.recv(65536)
                connection.sendall(answer)
            over.wait(60)
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(MarlRayError, match=message) as error:
            jobs.connect(f"http://127.0.0.1:{server.getsockname()[1]}")
    over.set()
    assert "\n" not in str(error.value)


def test_a_name_that_is_taken_and_cannot_be_read_is_one_line(tmp_path):
    """Two submit one name at once, and the dashboard fails between the answers to the second."""

    class Dashboard(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/version":
                self.reply(
                    200, json.dumps({"version": "4", "ray_version": "2", "ray_commit": "c", "session_name": "s"})
                )
            else:
                self.reply(*((500, "no such actor") if "/api/jobs/" in self.path else (200, "{}")))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(500, "Job with submission_id mine already exists")

        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with serving_http(Dashboard) as url, pytest.raises(MarlRayError) as error:
        jobs.run_job(jobs.connect(url), "true", tmp_path, PRINTER, submission_id="mine")
    assert str(error.value).startswith("job mine is there already and cannot be read: ")
    assert "no such actor" in str(error.value) and "\n" not in str(error.value)
