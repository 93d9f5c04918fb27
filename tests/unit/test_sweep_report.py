"""The report of a sweep, its numbers and the live table, from folders made by hand."""

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from toy_sweeps import LOST, NAN, REFUSED, TOTAL, ToySweep, whole

from marl_ray.cli import main
from marl_ray.config import RunConfig, parse_config
from marl_ray.config.sweep import MetricConfig
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.statistics import iqm, stratified_bootstrap
from marl_ray.tuning import progress
from marl_ray.tuning.compare import (
    Curve,
    bands,
    curve_of,
    differ,
    end_of,
    importances,
    improvement,
    probability_of_improvement,
)
from marl_ray.tuning.figures import curve_chart, number, parallel, strokes, ticks
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.progress import Progress
from marl_ray.tuning.report import write_report
from marl_ray.tuning.results import Record, Records, find_sweep, load_records, ranked, why, winner_of

RETURN = MetricConfig(window=2)
PLAIN = {"algorithm": "ippo", "hyper.lr": 0.001, "hyper.entropy_coef": 0.01}
VOID = {"meta", "link"}


class Tags(HTMLParser):
    """Names, attributes and text of a page; every tag that is opened must be closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def styled(self, tag: str, style: str) -> int:
        return sum(name == tag and style in (a.get("class") or "").split() for name, a in self.found)


def page_of(folder: Folder) -> Tags:
    """The report as `marl-ray report` writes it: one file that asks for nothing from elsewhere."""
    records = load_records(folder)
    assert records is not None
    path = Path(write_report(folder, records))
    assert path == Path(folder.path, "report.html")
    raw = path.read_text()
    tags = Tags(raw)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in tags.found}
    assert [attrs["href"] for tag, attrs in tags.found if "href" in attrs] == ["data:,"]
    assert not any("src" in attrs for _, attrs in tags.found)
    assert not re.search(r"url\((?!#)|@import|https?://", raw)
    assert "nan" not in raw.replace("finance", "").lower().split() and "inf" not in raw.split()
    return tags


def test_a_whole_sweep_is_told_with_every_trial_that_did_not_finish_and_why(tmp_path: Path):
    sweep = whole(tmp_path)
    page = page_of(sweep.end())
    assert page.text.count("return (max, window 3)") == 1
    assert "18: 9 stopped, 5 finished, 2 failed, 1 lost, 1 refused" in page.text
    assert "4 of 18 trials have no result" in page.text
    for reason in (NAN, "ValueError: <b>agent_0</b> took action 7 of 5", LOST, REFUSED):
        assert page.text.count(reason) == 2  # above all, and in the table
    assert "asha: place 6 of 14 at 10,000 steps" in page.text
    assert page.styled("tr", "won") == 1
    winner = ranked(sweep.records, sweep.config.metric)[0]
    assert f"Winner: trial {winner.number:04d}" in page.text
    assert page.styled("svg", "chart") == 2
    assert page.styled("path", "band") == 2 * 6
    assert page.styled("path", "line") == 2 * 14
    assert page.styled("table", "matrix") == 1
    assert page.styled("path", "thread") == 18
    assert page.styled("path", "none") == 4
    assert page.styled("div", "bar") == 4
    assert "250,000" in page.text  # paid for by five seeds


def test_the_winners_config_and_command_are_exact(tmp_path: Path):
    sweep = whole(tmp_path, trials=4, run={"env": {"id": "toy_envs:countdown"}, "train": {"total_steps": TOTAL}})
    folder = sweep.end()
    page = page_of(folder)
    assert f"marl-ray train {tmp_path}/toy/winner.yaml" in page.text
    assert f"marl-ray deploy --from-sweep {tmp_path}/toy" in page.text
    data = yaml.safe_load(Path(folder.path, "winner.yaml").read_text())
    record = sweep.records.trials[sweep.records.winner]
    assert parse_config(RunConfig, data) == sweep.config.run_config(record.values, data["name"], 0)
    assert data["name"] == f"toy-{record.number:04d}-seed-0"
    assert "env: id: toy_envs:countdown" in page.text


def test_one_trial_of_one_seed_has_no_band_no_matrix_and_no_importance(tmp_path: Path):
    sweep = ToySweep(tmp_path, seeds=1)
    sweep.train(sweep.add(PLAIN), 1.0)
    page = page_of(sweep.end())
    assert page.styled("path", "line") == 2
    assert page.styled("path", "band") == page.styled("table", "matrix") == page.styled("div", "bar") == 0
    assert "Needs 4 trials with results that differ; there is 1." in page.text
    assert "Interquartile mean over 1 seed of the mean of 3 iterations." in page.text


def test_no_trial_has_a_result(tmp_path: Path):
    sweep = ToySweep(tmp_path)
    sweep.add(PLAIN, "failed", NAN)
    sweep.add(PLAIN | {"hyper.lr": 0.01}, "refused", REFUSED)
    page = page_of(sweep.end())
    assert "No winner: no trial has a result." in page.text
    assert "No trial has reported it." in page.text
    assert page.styled("path", "none") == 2
    assert not Path(sweep.folder.path, "winner.yaml").exists()


def test_a_sweep_that_failed_before_its_first_trial_and_one_whose_driver_was_killed(tmp_path: Path):
    assert "RuntimeError: no cluster" in page_of(ToySweep(tmp_path, "a").end("failed", "RuntimeError: no cluster")).text
    sweep = ToySweep(tmp_path, "b")
    sweep.train(sweep.add(PLAIN, "running"), 1.0, 20_000)
    sweep.add(PLAIN | {"hyper.lr": 0.002}, "waiting", scores={10_000: -1e300})
    sweep.records.trials[1].configs = []
    page = page_of(sweep.end("running"))
    assert "The sweep has not ended" in page.text
    assert page.styled("span", "running") == 2  # of the sweep and of the trial
    assert page.styled("span", "waiting") == 1


def test_rows_that_are_missing_or_cut_off_leave_the_rest_as_it_is(tmp_path: Path):
    sweep = whole(tmp_path, trials=3)
    folder = sweep.end()
    Path(folder.path, "trials/0001/rows.jsonl").write_text('{"steps": 3')
    Path(folder.path, "trials/0002/rows.jsonl").unlink()
    page = page_of(folder)
    assert page.styled("path", "line") == 2
    assert page.styled("tr", "won") == 1


def test_takeovers_of_a_population_are_marked_and_listed(tmp_path: Path):
    space = {"hyper.lr": {"loguniform": [1e-4, 1e-1]}}
    keys: dict[str, Any] = {"space": space, "scheduler": {"kind": "pbt", "interval": 10_000}, "budget": {"trials": 2}}
    sweep = ToySweep(tmp_path, **keys)
    sweep.train(sweep.add({"hyper.lr": 0.01}), 2.0)
    taker = sweep.train(sweep.add({"hyper.lr": 0.012}), 3.0)
    taker.history = {10_000: {"hyper.lr": 0.0005}}
    taker.exploits = [{"at": 10_000, "donor": 0, "values": {"hyper.lr": 0.012}}]
    page = page_of(sweep.end())
    assert page.styled("circle", "mark") == 2
    assert "took over 0000" in page.text
    assert "10,000 0001 0000 lr=0.0005 lr=0.012" in page.text
    assert "It took over other trials 1 time, so this run from scratch is another one" in page.text


def test_several_metrics_have_their_own_columns_and_a_front(tmp_path: Path):
    keys = {"search": "tpe", "metric": [{"name": "return"}, {"name": "episode_cost", "mode": "min"}]}
    sweep = ToySweep(tmp_path, **keys)
    for lr, level, cost in ((0.001, 1.0, 0.2), (0.002, 2.0, 0.6), (0.003, 0.9, 0.7)):
        sweep.train(sweep.add(PLAIN | {"hyper.lr": lr}), level).objectives = [level, cost]
    page = page_of(sweep.end())
    assert [attrs["data-label"] for _, attrs in page.found if "data-label" in attrs][:5] == [
        "Trial",
        "Values",
        "return",
        "episode_cost",
        "95 % interval",
    ]
    assert page.text.count("Pareto") == 2


def test_why_a_trial_did_not_train_to_its_end():
    trials = [Record(k, {}, scores={10: float(k)}, status="stopped") for k in range(3)]
    records = Records("s", {"scheduler": {"kind": "median"}}, {}, trials=trials)
    assert [why(trial, records) for trial in trials] == [f"median: place {3 - k} of 3 at 10 steps" for k in range(3)]
    assert why(Record(3, {}, status="failed", error="broken"), records) == "broken"
    assert why(Record(3, {}, status="cut"), records) == "the sweep's budget was used up"
    assert why(Record(3, {}, status="finished"), records) == ""


def rows_of(*columns: list[float | None], exploits: list[int] | None = None) -> list[dict[str, float]]:
    """Rows 100 steps apart; a column for each seed."""
    rows = []
    for k, values in enumerate(zip(*columns, strict=True)):
        row: dict[str, float] = {"steps": 100 * (k + 1), "exploits": exploits[k] if exploits else 0}
        rows.append(row | {f"seed-{s}/return": v for s, v in enumerate(values) if v is not None})
    return rows


def test_a_curve_begins_where_all_seeds_have_a_value_and_is_smoothed_by_the_metrics_window():
    curve = curve_of(rows_of([1, 2, 3, 4], [None, 6, 8, math.nan]), [0, 1], RETURN)
    assert curve is not None
    assert curve.steps.tolist() == [200, 300, 400]
    assert curve.seeds.tolist() == [[1.5, 2.5, 3.5], [6, 7, 7]]
    assert curve_of(rows_of([None, None]), [0], RETURN) is None
    assert curve_of([], [0], RETURN) is None


def test_a_takeover_begins_a_new_window_and_steps_never_go_back():
    rows = rows_of([1, 1, 1, 9, 9], exploits=[0, 0, 0, 1, 1])
    for row in rows[3:]:
        row["steps"] -= 150
    curve = curve_of(rows, [0], RETURN)
    assert curve is not None
    assert curve.steps.tolist() == [100, 200, 250, 350]
    assert curve.seeds.tolist() == [[1, 1, 9, 9]]
    assert curve.at(200).tolist() == [1] and curve.at(1e9).tolist() == [9] and curve.at(0).tolist() == [1]


def test_bands_are_those_of_the_stratified_bootstrap():
    values = np.random.default_rng(0).normal(size=(8, 3)).cumsum(1)
    middle, low, high = bands(Curve(np.arange(3), values))
    for k in range(3):
        expected = stratified_bootstrap(values[:, k : k + 1])
        assert middle[k] == pytest.approx(iqm(values[:, k]))
        assert [low[k], high[k]] == pytest.approx([expected.low, expected.high], abs=0.06 * np.ptp(values[:, k]))
    one = end_of(Curve(np.array([5.0]), np.array([[2.0]])))
    assert one == (2.0, 2.0, 2.0)


SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=6).map(np.array)


@given(SCORES, SCORES)
@settings(deadline=None, max_examples=40)
def test_the_probability_of_improvement_counts_pairs(ours: np.ndarray, theirs: np.ndarray):
    found = probability_of_improvement(ours, theirs)
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in ours for b in theirs]
    assert found.value == pytest.approx(sum(pairs) / len(pairs))
    assert 0 <= found.low <= found.high <= 1
    assert probability_of_improvement(theirs, ours).value == pytest.approx(1 - found.value)


def test_trials_are_compared_where_both_have_been_and_in_the_metrics_own_direction():
    long = Curve(np.array([100.0, 200.0, 300.0]), np.array([[1.0, 2.0, 9.0], [1.0, 2.0, 9.0]]))
    short = Curve(np.array([100.0, 200.0]), np.array([[0.0, 3.0], [0.0, 4.0]]))
    assert improvement(short, long, RETURN).value == 1.0
    assert improvement(short, long, MetricConfig(mode="min")).value == 0.0


def test_two_are_told_apart_by_four_seeds_never_by_three():
    def level(value: float, seeds: int) -> Curve:
        return Curve(np.array([1.0]), value + 0.01 * np.arange(seeds)[:, None])

    assert not differ(level(5.0, 3), level(0.0, 3))
    assert differ(level(5.0, 4), level(0.0, 4))
    assert not differ(level(5.0, 1), level(0.0, 1))
    same = Curve(np.array([1.0]), np.ones((5, 1)))
    assert not differ(same, same)


def test_the_key_that_decides_is_the_important_one(tmp_path: Path):
    space = ToySweep(tmp_path).config.space
    rng = np.random.default_rng(0)
    values = [
        {"algorithm": "ippo", "hyper.lr": float(10 ** rng.uniform(-4, -2)), "hyper.entropy_coef": rng.uniform(0, 0.05)}
        for _ in range(40)
    ]
    found = importances(space, [(one, -abs(math.log10(one["hyper.lr"]) + 3)) for one in values])
    assert next(iter(found)) == "hyper.lr"
    assert found["hyper.lr"] > 0.6
    assert "algorithm" not in found  # it did not vary
    assert importances(space, [(one, 1.0) for one in values]) == {}
    assert importances(space, [(one, k) for k, one in enumerate(values[:3])]) == {}


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e6), st.integers(1, 12))
def test_ticks_are_few_and_inside(low: float, size: float, most: int):
    found = ticks(low, low + size, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * size <= value <= low + size * (1 + 1e-6) for value in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-15, "0"),
        (50_000, "50k"),
        (2_500, "2.5k"),
        (2_512.3, "2512"),
        (3e6, "3M"),
        (-1.23456, "\N{MINUS SIGN}1.235"),
    ],
)
def test_numbers_are_short(value: float, text: str):
    assert number(value) == text


def test_drawings_stay_in_their_frames(tmp_path: Path):
    curve = Curve(np.arange(1, 1001) * 50.0, np.random.default_rng(0).normal(size=(3, 1000)))
    flat = Curve(np.array([7.0]), np.zeros((3, 1)))
    chart = curve_chart(strokes({"a": (curve, [100.0]), "b": (flat, [])}), 800, 300)
    assert chart is not None
    for line in chart.lines:
        points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", line.path)[1:]]
        assert len(points) <= 200
        assert all(chart.left <= x <= chart.right and chart.top <= y <= chart.bottom for x, y in points)
    assert curve_chart({}, 800, 300) is None
    space = ToySweep(tmp_path).config.space
    trials = [("a", {"algorithm": "grpo", "train.group_size": 8, "hyper.lr": 0.01}, 1.0), ("b", {}, None)]
    drawing = parallel(space, trials, "return", "max", "a")
    assert drawing is not None
    assert [thread.style for thread in drawing.threads] == ["none", "best"]
    assert [tick.label for tick in drawing.axes[1].ticks] == ["4", "8", "not set"]
    assert [tick.label for tick in drawing.axes[2].ticks] == ["0.0001", "0.001", "0.01", "not set"]
    assert drawing.axes[-1].ticks[-1].label == "no result"


def test_a_sweep_is_found_by_folder_by_name_and_otherwise_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole(tmp_path, trials=2).end()
    assert find_sweep(f"{tmp_path}/toy/")[1].name == find_sweep("toy", str(tmp_path))[1].name == "toy"
    with pytest.raises(SystemExit) as done:
        main(["report", "toy", "--storage", str(tmp_path)])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"{tmp_path}/toy/report.html\n"
    with pytest.raises(
        MarlRayError, match=r"sweep 'none': expected a sweep's folder or name, but there is no .* or .*"
    ):
        find_sweep("none", str(tmp_path))
    for text in ("[]", "{", '{"trials": []}'):
        (tmp_path / "toy" / "sweep.json").write_text(text)
        with pytest.raises(MarlRayError, match=r"toy/sweep\.json is not the record of a sweep: ."):
            find_sweep("toy", str(tmp_path))


def test_a_winner_is_named_or_why_there_is_none(tmp_path: Path):
    whole(tmp_path, trials=3).end()
    model, told = winner_of(str(tmp_path / "toy"))
    assert model == "models:/toy/1"
    assert re.fullmatch(r"winner of sweep toy: trial 0000 \(algorithm=ippo lr=.* entropy_coef=.*\)", told)
    whole(tmp_path, trials=3, name="unregistered").end(model="")
    with pytest.raises(MarlRayError, match=r"winner, trial 0000, is not registered in MLflow; run the sweep's command"):
        winner_of("unregistered", str(tmp_path))
    for status, error, reason in (
        ("running", "", "it has not ended"),
        ("cut", "budget.hours=1 is used up", r"it was cut short \(budget.hours=1 is used up\)"),
        ("failed", "RuntimeError: x", "RuntimeError: x"),
        ("finished", "", "no trial has a result"),
    ):
        ToySweep(tmp_path, "none").end(status, error)
        with pytest.raises(MarlRayError, match=f"sweep 'none' has no winner: {reason}; see .*/none/report.html"):
            winner_of("none", str(tmp_path))


def screen(height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140, height=height, color_system=None)


def test_the_live_table_shows_each_trial_where_it_is_and_marks_the_best(tmp_path: Path):
    sweep = whole(tmp_path, trials=4)
    sweep.add(PLAIN, "running", steps=25_000)
    console = screen()
    with Progress(sweep.config, sweep.records, console):
        pass
    shown = console.file.getvalue()
    best = max(sweep.records.trials[:4], key=lambda record: record.objectives[0])
    line = next(line for line in shown.splitlines() if ", best" in line)
    assert line.split()[0] == f"{best.number:04d}"
    assert re.search(r"0008 .* running +25,000 \(50%\)", shown)
    assert "stopped" in shown and "asha: place" in shown
    assert "seed 1: policy 'shared'" in shown


def test_a_table_of_many_trials_fits_the_terminal(tmp_path: Path):
    sweep = ToySweep(tmp_path)
    for k in range(60):
        sweep.add(PLAIN | {"hyper.lr": 0.001 + k * 1e-5}, "running" if k == 7 else "finished", objectives=[float(-k)])
    console = screen(height=20)
    console.print(Progress(sweep.config, sweep.records, console).table())
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 20
    assert any("and 48 more" in line for line in lines)
    assert any(line.split()[:1] == ["0007"] for line in lines)
    assert any(line.split()[:1] == ["0000"] and "best" in line for line in lines)


def test_where_there_is_no_terminal_a_line_comes_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sweep = whole(tmp_path, trials=4)
    console = Console(file=io.StringIO())
    with Progress(sweep.config, sweep.records, console) as shown:
        shown.show()
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        shown.show()
        line = capsys.readouterr().out
    assert line.startswith("toy: 3 ") or line.startswith("toy: 2 ")
    assert re.search(r"steps, \d+ s; best 000\d: return \d", line)
    quiet = ToySweep(tmp_path, "quiet", run={"env": {"id": "toy_envs:countdown"}, "tracking": {"progress": False}})
    with Progress(quiet.config, quiet.records, screen()) as silent:
        silent.show()
    assert capsys.readouterr().out == silent.console.file.getvalue() == ""
