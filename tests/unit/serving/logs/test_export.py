"""Export: what was decided, joined with what came of it, in the layout of trajectories."""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from servers.http_server import serving_http
from stores.migrated import migrate
from stores.single_reports import record_metrics, record_outcome

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.logs import export as export_module
from marl_ray.serving.logs.act_reader import read_logged
from marl_ray.serving.logs.acts import ActLog, LoggedAct, LoggedText, upload
from marl_ray.serving.logs.export import ExportSummary, export
from marl_ray.temporary_folders import FOLDER_NAME
from marl_ray.trajectories import Trajectories

AGENTS = ("left", "right")


@pytest.fixture
def stores(tmp_path) -> Iterator[Stores]:
    stores = open_stores(migrate(f"sqlite:///{tmp_path}/experiments.db"))
    stores.experiments.open("exp", {"salt": "s", "arms": {a: {"digest": a * 4, "weight": 1} for a in "ab"}})
    yield stores
    stores.close()


def act(unit: str, at: float, arm: str = "a", agents: tuple[str, ...] = AGENTS, **more) -> LoggedAct:
    seen = {agent: [[at, i], [0, True]] for i, agent in enumerate(agents)}
    log_probs = {agent: -at - i for i, agent in enumerate(agents)}
    record = LoggedAct("exp", unit, arm, arm * 4, 1, 0.5, at, False, seen, dict.fromkeys(agents, 3), log_probs)
    return replace(record, **more)


def write(folder: str | Path, decisions: Sequence[LoggedAct | LoggedText]) -> None:
    log = ActLog(str(folder), capacity=len(decisions))
    assert all(log.put(decision) for decision in decisions)
    log.close()
    assert log.dropped == 0


def outcome(stores: Stores, unit: str, value: float, arm: str = "a", cost: float | None = None) -> None:
    stores.units.record_exposures([Exposure("exp", unit, Assignment(arm, 1, 0.5), 10.0)])
    record_outcome(stores.units, "exp", unit, value, at=99.0)
    if cost is not None:
        record_metrics(stores.units, "exp", unit, {"cost": cost})


def rows(path: str) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_a_row_is_one_agents_sequence_with_its_units_outcome(stores, tmp_path):
    masked = act("u", 2.0, agents=("left",), masks={"left": [0, 1]}, greedy=True)
    write(tmp_path / "log", [act("u", 3.0), masked, act("u", 1.0)])
    outcome(stores, "u", 7.5, cost=2.0)
    summary = export(stores.experiments, stores.units, "exp", str(tmp_path / "log"), str(tmp_path / "out"))
    assert summary == ExportSummary(1, 2, 3, 0, 0, str(tmp_path / "out/exp.parquet"))
    left, right = rows(summary.path)
    assert left == {
        "experiment": "exp",
        "unit": "u",
        "arm": "a",
        "digest": "aaaa",
        "epoch": 1,
        "propensity": 0.5,
        "agent": "left",
        "group": 0,
        "episode": 0,
        "turn": 0,
        "greedy": True,
        "exposed_at": 10.0,
        "outcome": 7.5,
        "outcome_at": 99.0,
        "observations": [[1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0]],
        "actions": [[3.0]] * 3,
        "log_probs": [-1.0, -2.0, -3.0],
        "action_masks": [[True, True], [False, True], [True, True]],
        "rewards": [0.0, 0.0, 7.5],
        "costs": [[0.0], [0.0], [2.0]],
        "mask": [True, False, True],
        "terminated": [False, False, True],
        "truncated": [False] * 3,
    }
    assert (right["agent"], right["greedy"], right["action_masks"]) == ("right", False, None)
    assert (right["rewards"], right["mask"], right["log_probs"]) == ([0.0, 7.5], [True, True], [-2.0, -4.0])
    metadata = pq.read_schema(summary.path).metadata
    assert metadata == {b"marl_ray.schema_version": b"1", b"marl_ray.experiment": b"exp"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["exp.parquet"]


def test_units_without_an_outcome_or_of_two_bundles_are_left_out_and_counted(stores, tmp_path):
    changed = [act("two", 1.0), act("two", 2.0, digest="new")]
    moved = [act("moved", 1.0, arm="b"), act("moved", 2.0, arm="a")]
    write(tmp_path, [*changed, *moved, act("other", 1.0, arm="b"), act("silent", 1.0), act("kept", 1.0)])
    for unit in ("two", "other", "kept", "never acted"):
        outcome(stores, unit, 1.0)
    outcome(stores, "moved", 1.0, arm="b")
    summary = export(stores.experiments, stores.units, "exp", str(tmp_path), str(tmp_path))
    assert (summary.units, summary.decisions, summary.censored, summary.mixed) == (1, 1, 1, 3)
    assert {(row["unit"], tuple(map(tuple, row["costs"]))) for row in rows(summary.path)} == {("kept", ((),))}


def test_what_an_earlier_experiment_of_the_name_logged_is_left_out(stores, tmp_path):
    earlier = LoggedText(
        *("exp", "t", "a", "text", 1, 0.5, 1.0, False, "left", "so", [], [], [1], "x", [2], [-1.0], "stop", 0, {}, [])
    )
    write(tmp_path / "log", [earlier, replace(earlier, unit="never"), act("u", 1.0), act("v", 1.0, digest="earlier")])
    for unit in "tuv":
        outcome(stores, unit, 1.0)
    summary = export(stores.experiments, stores.units, "exp", str(tmp_path / "log"), str(tmp_path / "out"))
    assert (summary.units, summary.censored, summary.mixed) == (1, 1, 2)
    assert [(row["unit"], len(row["observations"])) for row in rows(summary.path)] == [("u", 1)] * 2


def test_rows_are_in_order_in_bounded_groups_whatever_the_log(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "GROUP_ROWS", 10)
    units = [f"u{i:02}" for i in range(40)]
    made = [act(unit, float(t)) for unit in units for t in range(4)]
    for number, unit in enumerate(units):
        outcome(stores, unit, float(number), cost=None if number % 2 else 0.5)
    paths = []
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(made))
        for part in np.array_split(order, 3):
            write(tmp_path / f"log{seed}", [made[i] for i in part])
        paths.append(
            export(
                stores.experiments, stores.units, "exp", str(tmp_path / f"log{seed}"), str(tmp_path / f"out{seed}")
            ).path
        )
    exported = rows(paths[0])
    assert exported == rows(paths[1])
    assert [(row["unit"], row["agent"]) for row in exported] == [(unit, agent) for unit in units for agent in AGENTS]
    assert (
        [row["episode"] for row in exported]
        == [row["group"] for row in exported]
        == np.repeat(np.arange(40), 2).tolist()
    )
    groups = pq.ParquetFile(paths[0])
    assert [groups.metadata.row_group(i).num_rows for i in range(groups.num_row_groups)] == [10] * 8


def test_rows_fill_trajectories(stores, tmp_path):
    write(tmp_path, [act(f"u{i}", float(t)) for i in range(5) for t in range(3)])
    for i in range(5):
        outcome(stores, f"u{i}", 0.1 * i, cost=1.0)
    exported = rows(export(stores.experiments, stores.units, "exp", str(tmp_path), str(tmp_path)).path)
    column = {
        name: torch.tensor([row[name] for row in exported])
        for name in exported[0]
        if isinstance(exported[0][name], list)
    }
    nothing = torch.zeros(10, 3)
    made = Trajectories(
        **column,
        states=None,
        action_masks=None,
        values=nothing,
        bootstrap=nothing,
        cost_values=nothing[..., None],
        cost_bootstrap=nothing[..., None],
        **{name: torch.tensor([row[name] for row in exported]) for name in ("greedy", "group", "episode", "turn")},
        agent=torch.tensor([AGENTS.index(row["agent"]) for row in exported]),
    )
    assert made.observations.shape == (10, 3, 4)
    assert made.agents == 2
    assert made.rewards.sum(1).tolist() == pytest.approx([row["outcome"] for row in exported])


def test_what_is_wrong_is_named(stores, tmp_path):
    (tmp_path / "file").touch()
    write(tmp_path / "log", [act("u", 1.0)])
    log, out = str(tmp_path / "log"), str(tmp_path / "out")
    for arguments, message in (
        (("none", log, out), "experiment: unknown experiment 'none'"),
        (
            ("exp", str(tmp_path / "empty"), out),
            "decisions: expected logged requests of experiment 'exp' in .*, found none",
        ),
        (("exp", log, str(tmp_path / "file/x")), "out: .* cannot be written"),
        (("exp", log, "nope://bucket"), "out: 'nope://bucket' cannot be used"),
        (("exp", "nope://bucket", out), "decisions: 'nope://bucket' cannot be used"),
    ):
        with pytest.raises(MarlRayError, match=f"^{message}") as caught:
            export(stores.experiments, stores.units, *arguments)
        assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def unchunk(stream: Any) -> io.BytesIO:
    """The content of HTTP's chunked encoding, or of S3's own."""
    buffer = io.BytesIO()
    while (size := int(stream.readline().partition(b";")[0], 16)) > 0:
        buffer.write(stream.read(size))
        stream.readline()
    while stream.readline().strip():  # trailers
        pass
    buffer.seek(0)
    return buffer


class Bucket(BaseHTTPRequestHandler):
    """The part of S3 that pyarrow speaks."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    parts: dict[str, dict[int, bytes]]

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "ETag": '"x"'} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def body(self) -> bytes:
        data = self.rfile
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = unchunk(data)
        else:
            data = io.BytesIO(data.read(int(self.headers.get("Content-Length", 0))))
        return (unchunk(data) if "aws-chunked" in self.headers.get("Content-Encoding", "") else data).read()

    @property
    def target(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        return unquote(parts.path).lstrip("/"), {name: values[0] for name, values in query.items()}

    def do_PUT(self) -> None:
        (key, query), data = self.target, self.body()
        if "uploadId" in query:
            self.parts.setdefault(key, {})[int(query["partNumber"])] = data
        else:
            self.objects[key] = data
        self.answer()

    def do_POST(self) -> None:
        (key, query), _ = self.target, self.body()
        if "uploads" in query:
            self.answer(b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
            return
        parts = self.parts.pop(key)
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        self.answer(b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>')

    def do_GET(self) -> None:
        key, query = self.target
        if "list-type" in query:
            prefix = query.get("prefix", "")
            full = {name: data for name, data in self.objects.items() if name.startswith(f"{key.rstrip('/')}/{prefix}")}
            contents = "".join(
                f"<Contents><Key>{name.partition('/')[2]}</Key><Size>{len(data)}</Size></Contents>"
                for name, data in full.items()
            )
            body = f"<ListBucketResult><KeyCount>{len(full)}</KeyCount><IsTruncated>false</IsTruncated>{contents}"
            self.answer(f"{body}</ListBucketResult>".encode())
        elif key not in self.objects:
            self.answer(b"<Error><Code>NoSuchKey</Code></Error>", 404)
        else:
            self.answer_part(self.objects[key])

    def answer_part(self, data: bytes) -> None:
        """Send the bytes that the request asks for: all, or a range."""
        byte_range = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not byte_range:
            self.answer(data)
            return
        low, high = int(byte_range[1]), min(int(byte_range[2]), len(data) - 1)
        self.answer(data[low : high + 1], 206, Content_Range=f"bytes {low}-{high}/{len(data)}")

    do_HEAD = do_GET


@pytest.fixture
def bucket(monkeypatch) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Query of URIs that mean this S3, and its objects."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    objects: dict[str, bytes] = {}
    handler = type("Handler", (Bucket,), {"objects": objects, "parts": {}})
    with serving_http(handler) as url:
        yield f"?scheme=http&region=us-east-1&endpoint_override={url.removeprefix('http://')}", objects


def test_log_and_out_may_be_buckets(stores, tmp_path, bucket, monkeypatch):
    query, objects = bucket
    write(f"s3://bucket/log{query}", [act("u", float(i)) for i in range(5)])
    (key,) = objects
    assert re.fullmatch(r"bucket/log/exp/decisions-\d+-[0-9a-f]{16}\.jsonl\.zst", key)
    assert len(list(read_logged(f"s3://bucket/log{query}", "exp"))) == 5
    outcome(stores, "u", 1.0)
    made = []

    def note_and_upload(file: Path, *rest: Any) -> None:
        made.append(file)
        upload(file, *rest)

    monkeypatch.setattr(export_module, "upload", note_and_upload)
    summary = export(stores.experiments, stores.units, "exp", f"s3://bucket/log{query}", f"s3://bucket/out{query}")
    assert FOLDER_NAME.fullmatch(made[0].parent.name)  # so that another process removes it after this one was killed
    assert not made[0].parent.exists()
    assert (summary.decisions, summary.path) == (5, "s3://bucket/out/exp.parquet")
    (tmp_path / "copy.parquet").write_bytes(objects["bucket/out/exp.parquet"])
    assert len(rows(str(tmp_path / "copy.parquet"))) == 2
