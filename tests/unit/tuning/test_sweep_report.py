"""The report of a sweep, its winner and the live table, from folders made by hand."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes.command_line import keys_of
from rich.console import Console
from toy_runs.sweeps import LOST, NAN, REFUSED, TOTAL, ToySweep, finished_sweep, write_rows

from marl_ray.cli import main
from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.tuning.folder import Folder, read_rows
from marl_ray.tuning.lookup import find_sweep, winner_of
from marl_ray.tuning.records import SweepRecords, TrialRecord, end_reason, ranked_trials
from marl_ray.tuning.records_file import load_records
from marl_ray.tuning.reporting import progress
from marl_ray.tuning.reporting.progress import SweepProgress
from marl_ray.tuning.reporting.report import write_report
from marl_ray.tuning.running.driver import SweepResult

PLAIN = {"algorithm": "ippo", "hyper.lr": 0.001, "hyper.entropy_coef": 0.01}
VOID = {"meta", "link"}


class Tags(HTMLParser):
    """Names, attributes and text of a page; every tag that is opened must be closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def styled(self, tag: str, style: str) -> int:
        return sum(name == tag and style in (a.get("class") or "").split() for name, a in self.elements)


def page_of(folder: Folder) -> Tags:
    """The report as `marl-ray report` writes it: one file that asks for nothing from elsewhere."""
    records = load_records(folder)
    assert records is not None
    path = Path(write_report(folder, records))
    assert path == Path(folder.path, "report.html")
    raw = path.read_text()
    tags = Tags(raw)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in tags.elements}
    assert [attrs["href"] for tag, attrs in tags.elements if "href" in attrs] == ["data:,"]
    assert not any("src" in attrs for _, attrs in tags.elements)
    assert not re.search(r"url\((?!#)|@import|https?://", raw)
    assert "nan" not in raw.replace("finance", "").lower().split() and "inf" not in raw.split()
    return tags


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[ToySweep, Tags]:
    """A sweep in which trials ended in every way, and its report."""
    sweep = finished_sweep(tmp_path_factory.mktemp("finished"))
    return sweep, page_of(sweep.end())


def test_the_report_counts_the_trials_by_their_ends(finished):
    _, page = finished
    assert page.text.count("eval/return (max, window 1)") == 1
    assert "18: 9 stopped, 5 finished, 2 failed, 1 lost, 1 refused" in page.text
    assert "4 of 18 trials have no result" in page.text
    assert "250,000" in page.text  # steps that five seeds have paid for


@pytest.mark.parametrize("reason", [NAN, "ValueError: <b>agent_0</b> took action 7 of 5", LOST, REFUSED])
def test_the_reason_why_a_trial_failed_is_above_all_and_in_the_table(finished, reason):
    assert finished[1].text.count(reason) == 2


def test_a_stopped_trial_has_its_place_at_the_rung(finished):
    assert "asha: place 6 of 14 at 10,000 steps" in finished[1].text


def test_the_report_marks_the_winner(finished):
    sweep, page = finished
    winner = ranked_trials(sweep.records, sweep.config.metric)[0]
    assert f"Winner: trial {winner.number:04d}" in page.text
    assert page.styled("tr", "won") == 1


@pytest.mark.parametrize(
    ("tag", "style", "count"),
    [
        ("svg", "chart", 2),
        ("path", "band", 2 * 6),
        ("path", "line", 2 * 14),
        ("table", "matrix", 1),
        ("path", "thread", 18),
        ("path", "none", 4),
        ("div", "bar", 4),
    ],
)
def test_the_report_draws_the_trials_that_have_a_result(finished, tag, style, count):
    assert finished[1].styled(tag, style) == count


def test_the_winners_config_and_command_are_exact(tmp_path):
    sweep = finished_sweep(
        tmp_path, trials=4, run={"env": {"id": "toys.envs:countdown"}, "train": {"total_steps": TOTAL}}
    )
    folder = sweep.end()
    page = page_of(folder)
    assert f"marl-ray train {tmp_path}/toy/winner.yaml" in page.text
    assert f"marl-ray deploy --from-sweep {tmp_path}/toy" in page.text
    data = yaml.safe_load(Path(folder.path, "winner.yaml").read_text())
    assert sweep.records.winner is not None
    record = sweep.records.trials[sweep.records.winner]
    assert parse_config(RunConfig, data) == sweep.config.run_config(record.values, data["name"], 0)
    assert data["name"] == f"toy-{record.number:04d}-seed-0"
    assert "env: id: toys.envs:countdown" in page.text


def test_one_trial_of_one_seed_has_no_band_no_matrix_and_no_importance(tmp_path):
    sweep = ToySweep(tmp_path, seeds=1)
    sweep.train(sweep.add(PLAIN), 1.0)
    page = page_of(sweep.end())
    assert page.styled("path", "line") == 2
    assert page.styled("path", "band") == page.styled("table", "matrix") == page.styled("div", "bar") == 0
    assert "Needs 4 trials with results that differ; there is 1." in page.text
    assert "Interquartile mean over 1 seed." in page.text


def test_no_trial_has_a_result(tmp_path):
    sweep = ToySweep(tmp_path)
    sweep.add(PLAIN, "failed", NAN)
    sweep.add(PLAIN | {"hyper.lr": 0.01}, "refused", REFUSED)
    page = page_of(sweep.end())
    assert "No winner: no trial has a result." in page.text
    assert "No trial has reported it." in page.text
    assert page.styled("path", "none") == 2
    assert not Path(sweep.folder.path, "winner.yaml").exists()


def test_a_sweep_that_failed_before_its_first_trial_and_one_whose_driver_was_killed(tmp_path):
    assert "RuntimeError: no cluster" in page_of(ToySweep(tmp_path, "a").end("failed", "RuntimeError: no cluster")).text
    sweep = ToySweep(tmp_path, "b")
    sweep.train(sweep.add(PLAIN, "running"), 1.0, 20_000)
    sweep.add(PLAIN | {"hyper.lr": 0.002}, "waiting", scores={10_000: -1e300})
    sweep.records.trials[1].configs = []
    page = page_of(sweep.end("running"))
    assert "The sweep has not ended" in page.text
    assert page.styled("span", "running") == 2  # of the sweep and of the trial
    assert page.styled("span", "waiting") == 1


def test_rows_that_are_missing_or_cut_off_leave_the_rest_as_it_is(tmp_path):
    sweep = finished_sweep(tmp_path, trials=3)
    folder = sweep.end()
    Path(folder.path, "trials/0001/rows.jsonl").write_text('{"steps": 3')
    Path(folder.path, "trials/0002/rows.jsonl").unlink()
    page = page_of(folder)
    assert page.styled("path", "line") == 2
    assert page.styled("tr", "won") == 1


def test_takeovers_of_a_population_are_marked_and_listed(tmp_path):
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


def test_several_metrics_have_their_own_columns_and_a_front(tmp_path):
    keys = {"search": "tpe", "metric": [{"name": "return"}, {"name": "episode_cost", "mode": "min"}]}
    sweep = ToySweep(tmp_path, **keys)
    for lr, level, cost in ((0.001, 1.0, 0.2), (0.002, 2.0, 0.6), (0.003, 0.9, 0.7)):
        sweep.train(sweep.add(PLAIN | {"hyper.lr": lr}), level).objectives = [level, cost]
    page = page_of(sweep.end())
    assert [attrs["data-label"] for _, attrs in page.elements if "data-label" in attrs][:5] == [
        "Trial",
        "Values",
        "return",
        "episode_cost",
        "95 % interval",
    ]
    assert page.text.count("Pareto") == 2


def test_why_a_trial_did_not_train_to_its_end():
    trials = [TrialRecord(k, {}, scores={10: float(k)}, status="stopped") for k in range(3)]
    records = SweepRecords("s", {"scheduler": {"kind": "median"}}, {}, trials=trials)
    assert [end_reason(trial, records) for trial in trials] == [
        f"median: place {3 - k} of 3 at 10 steps" for k in range(3)
    ]
    assert end_reason(TrialRecord(3, {}, status="failed", error="broken"), records) == "broken"
    assert end_reason(TrialRecord(3, {}, status="interrupted"), records) == "the sweep's budget was used up"
    assert end_reason(TrialRecord(3, {}, status="finished"), records) == ""


def test_the_end_of_a_sweep_is_a_document(tmp_path):
    sweep = finished_sweep(tmp_path, trials=2)
    sweep.end()
    result = SweepResult("toy", f"{tmp_path}/toy", sweep.records, "")
    document: dict[str, Any] = result.document()
    assert set(document) == keys_of("sweep") and document["trials"]["lost"] == 1
    assert document["winner"]["trial"] == sweep.records.winner and document["report"] is None
    assert "distinguishable from trial 0001: difference" in document["winner"]["certainty"]
    ranking = {trial["trial"]: trial for trial in document["ranking"]}
    assert next(iter(ranking)) == sweep.records.winner and len(ranking) > 1
    for number, trial in ranking.items():
        assert trial["values"] == sweep.records.trials[number].values
        low, high = trial["interval"]
        assert low <= trial["scores"]["eval/return"] <= high


def test_page_and_command_say_that_a_winner_by_chance_is_none(tmp_path):
    sweep = ToySweep(tmp_path)
    for lr in (0.001, 0.002):
        sweep.train(sweep.add(PLAIN | {"hyper.lr": lr}), 2.0)
    folder = sweep.end()
    result = SweepResult("toy", folder.uri, sweep.records, "")
    lines = str(result).splitlines()
    winner = next(number for number, line in enumerate(lines) if line.startswith("  winner  "))
    other = 1 - sweep.records.winner
    text = f"ot distinguishable from trial {other:04d}: difference 0."
    assert lines[winner + 1].startswith(f"          n{text}") and ", 5 seeds, probability of" in lines[winner + 1]
    span = r"eval/return [\d.]+ \([\d.]+ to [\d.]+\)"
    assert re.search(f"^  winner  trial {sweep.records.winner:04d} .*: {span}$", str(result), re.MULTILINE)
    assert re.search(f"^  next    trial {other:04d} .*: {span}$", str(result), re.MULTILINE)
    assert f"N{text}" in page_of(folder).text


def test_a_sweep_is_found_by_folder_by_name_and_otherwise_named(tmp_path, capsys):
    finished_sweep(tmp_path, trials=2).end()
    assert find_sweep(f"{tmp_path}/toy/")[1].name == find_sweep("toy", str(tmp_path))[1].name == "toy"
    with pytest.raises(SystemExit) as done:
        main(["report", "toy", "--storage", str(tmp_path)])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"{tmp_path}/toy/report.html\n"
    with pytest.raises(MarlRayError, match=r"there is no .*; did you mean toy\?$"):
        find_sweep("tyo", str(tmp_path))
    with pytest.raises(
        MarlRayError, match=r"sweep 'none': expected a sweep's folder or name, but there is no .* or .*"
    ):
        find_sweep("none", str(tmp_path))
    for text in ("[]", "{", '{"trials": []}', '{"format": 1, "trials": []}'):
        (tmp_path / "toy" / "sweep.json").write_text(text)
        with pytest.raises(MarlRayError, match=r"toy/sweep\.json is not the record of a sweep: ."):
            find_sweep("toy", str(tmp_path))


def test_a_winner_is_named_or_why_there_is_none(tmp_path):
    finished_sweep(tmp_path, trials=3).end()
    model, message = winner_of(str(tmp_path / "toy"))
    assert model == "models:/toy/1"
    assert re.fullmatch(r"winner of sweep toy: trial 0000 \(algorithm=ippo lr=.* entropy_coef=.*\)", message)
    finished_sweep(tmp_path, trials=3, name="unregistered").end(model="")
    with pytest.raises(MarlRayError, match=r"winner, trial 0000, is not registered in MLflow; run the sweep's command"):
        winner_of("unregistered", str(tmp_path))
    for status, error, reason in (
        ("running", "", "it has not ended"),
        ("interrupted", "budget.hours=1 is used up", r"it was interrupted \(budget.hours=1 is used up\)"),
        ("failed", "RuntimeError: x", "RuntimeError: x"),
        ("finished", "", "no trial has a result"),
    ):
        ToySweep(tmp_path, "none").end(status, error)
        with pytest.raises(MarlRayError, match=f"sweep 'none' has no winner: {reason}; see .*/none/report.html"):
            winner_of("none", str(tmp_path))


def screen(height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140, height=height, color_system=None)


def text_of(console: Console) -> str:
    """The text that a console has written to its file."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_table_shows_each_trial_where_it_is_and_marks_the_best(tmp_path):
    sweep = finished_sweep(tmp_path, trials=4)
    sweep.add(PLAIN, "running", steps=25_000)
    console = screen()
    with SweepProgress(sweep.config, sweep.records, console):
        pass
    shown = text_of(console)
    scores = {record.number: record.objectives[0] for record in sweep.records.trials[:4] if record.objectives}
    assert len(scores) == 4
    best = max(scores, key=lambda number: scores[number])
    line = next(line for line in shown.splitlines() if ", best" in line)
    assert line.split()[0] == f"{best:04d}"
    assert re.search(r"0008 .* running +25,000 \(50%\)", shown)
    assert "stopped" in shown and "asha: place" in shown
    assert "seed 1: policy 'shared'" in shown


def test_a_table_of_many_trials_fits_the_terminal(tmp_path):
    sweep = ToySweep(tmp_path)
    for k in range(60):
        sweep.add(PLAIN | {"hyper.lr": 0.001 + k * 1e-5}, "running" if k == 7 else "finished", objectives=[float(-k)])
    console = screen(height=20)
    console.print(SweepProgress(sweep.config, sweep.records, console).table())
    lines = text_of(console).splitlines()
    assert len(lines) <= 20
    assert any("and 48 more" in line for line in lines)
    assert any(line.split()[:1] == ["0007"] for line in lines)
    assert any(line.split()[:1] == ["0000"] and "best" in line for line in lines)


def test_where_there_is_no_terminal_a_line_comes_now_and_then(tmp_path, monkeypatch, capsys):
    sweep = finished_sweep(tmp_path, trials=4)
    console = Console(file=io.StringIO())
    with SweepProgress(sweep.config, sweep.records, console) as shown:
        shown.show()
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        shown.show()
        line = capsys.readouterr().out
    assert line.startswith(("toy: 3 ", "toy: 2 "))
    assert re.search(r"steps, \d+ s; best 000\d: eval/return \d", line)
    quiet = ToySweep(tmp_path, "quiet", run={"env": {"id": "toys.envs:countdown"}, "tracking": {"progress": False}})
    with SweepProgress(quiet.config, quiet.records, screen()) as silent:
        silent.show()
    assert capsys.readouterr().out == text_of(silent.console) == ""


def test_a_constrained_sweep_shows_every_trials_cost_against_its_budget(tmp_path):
    run = {"env": {"id": "toys.envs:countdown"}, "train": {"total_steps": TOTAL}, "algorithm": "ppo_lagrangian"}
    space = {"hyper.lr": {"loguniform": [1e-4, 1e-1]}}
    sweep = ToySweep(tmp_path, run=run | {"constraints": [{"budget": 30}]}, space=space, seeds=2)
    trial = sweep.train(sweep.add({"hyper.lr": 0.01}), 2.0)
    home = Folder(str(tmp_path), "toy", "trials", "0000")
    rows = read_rows(home)
    for seed, cost, share in ((0, 29.5, 0.75), (1, 30.5, 0.5)):
        figures = {"return": 2.5 + seed, "episode_cost_0": cost, "within_budget": share, "within_budget_105": 0.9}
        figures |= {"within_budget_certified": share - 0.1, "within_budget_105_certified": 0.8}
        for prefix in ("eval", "best"):
            rows[-1] |= {f"seed-{seed}/{prefix}/{key}": value for key, value in figures.items()}
    write_rows(home, rows)
    page = page_of(sweep.end())
    assert "29.5 to 30.5" in page.text and "of 30" in page.text and page.styled("span", "over") == 1
    assert "50.0 % 40.0 % or more" in page.text and "90.0 % 80.0 % or more" in page.text
    assert f"best return 2.500, cost 29.50 of 30 at step {TOTAL:,}" in page.text
    assert "Cost against the budget: eval/episode_cost_0" in page.text
    assert page.styled("line", "budget") == 2 and page.styled("svg", "chart") == 4
    assert trial.number == 0
    # Without constraints nothing is said of costs.
    assert "of budget" not in page_of(finished_sweep(tmp_path / "b", trials=2).end()).text


def test_a_trial_says_which_hyper_parameters_it_was_not_given(tmp_path):
    sweep = finished_sweep(tmp_path)
    sweep.records.trials[0].unread = ["hyper.pid_kp", "team.rival.hyper.clip"]
    assert page_of(sweep.end()).text.count("not applicable: pid_kp, team.rival.hyper.clip") == 1
