"""Comparisons of runs that the parts of a run have written, by the command and by a program."""

import json

import pytest
from processes.command_line import keys_of, marl_ray
from toy_runs.runs import store_run

import marl_ray as api
from marl_ray.errors import MarlRayError
from marl_ray.runs.comparison import group_by_seed
from marl_ray.runs.plot import group_line, legend_line, legend_title
from marl_ray.runs.stored import find_run


def test_runs_are_compared_by_seeds(storage):
    picture = storage / "all.png"
    arguments = ("runs", "compare", "first", "second", "other", "--storage", storage, "--out", picture)
    compared = json.loads(marl_ray(*arguments, "--json").stdout)
    assert set(compared) == keys_of("runs compare") and compared["metric"] == "eval/return"
    assert [[run["seed"] for run in group["runs"]] for group in compared["groups"]] == [[0], [1, 2]]
    both = compared["groups"][1]["score"]
    assert both["value"] == 1.5 and [both["low"], both["high"]] == pytest.approx([1.5 - 6.353, 1.5 + 6.353], abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = marl_ray(*arguments).stdout.splitlines()
    assert lines[5:7] == ["other: algorithm=ippo", "second and 1 more: algorithm at its default"] or lines[5:7] == [
        "other: algorithm=ippo",
        "first and 1 more: algorithm at its default",
    ]
    assert len(lines) == 8 and lines[-1] == f"eval/return over environment steps: {picture}"


def test_a_longer_run_is_of_another_group_and_no_seed_counts_twice(storage):
    store_run(storage, "longer", "seed=1", "train.total_steps=640", score=3.0)
    store_run(storage, "again", "seed=1", score=2.0)
    groups = group_by_seed([find_run(name, str(storage)) for name in ("first", "second", "longer", "again")])
    assert sorted(sorted(curve.name for curve in group.runs) for group in groups) == [
        ["again"],
        ["first", "second"],
        ["longer"],
    ]
    assert next(g for g in groups if g.runs[0].name == "longer").differences["train.total_steps"] == 640


def test_a_picture_is_not_written_into_a_folder_that_is_missing(storage):
    out = storage / "pictures" / "all.png"
    with pytest.raises(MarlRayError, match=r"^out: '.*all\.png' cannot be written: there is no folder '.*pictures'$"):
        api.compare(["first"], storage=storage).plot(out)
    assert not out.parent.exists()


def test_the_legend_is_below_the_axes_and_short(storage):
    store_run(storage, "fast", "seed=1", "hyper.lr=10", "train.horizon=16", "checkpoint.every=3", score=-1.0)
    groups = group_by_seed([find_run(name, str(storage)) for name in ("first", "second", "fast")])
    assert [legend_line(group) for group in groups] == ["first and 1 more: 1.5 [-4.85, 7.85]", "fast: -1 [-1.5, -0.5]"]
    assert legend_title(groups[1:]) == "band: 95 % interval of each point; number: last evaluation [95 % interval]"
    assert legend_title(groups[:1]) == ("thin: each seed, thick: their mean; number: mean over 2 seeds [95 % interval]")


def test_what_differs_is_in_the_line_of_a_group(storage):
    store_run(storage, "fast", "seed=1", "hyper.lr=10", "train.horizon=16", score=-1.0)
    runs = [find_run(name, str(storage)) for name in ("first", "fast")]
    first, fast = group_by_seed(runs)
    assert first.differences == {"hyper.lr": 0.01, "train.horizon": 8}
    assert fast.differences == {"hyper.lr": 10, "train.horizon": 16}
    assert group_line(fast) == "fast: mappo, seed 1, hyper.lr=10.0, train.horizon=16, -1 [-1.5, -0.5]"


def test_a_metric_of_which_more_may_be_worse_ranks_nobody(storage):
    rows = "".join(json.dumps({"iteration": n, "steps": 96 * n, "entropy": 1.0 / n}) + "\n" for n in (1, 2))
    for name, text in (("first", rows), ("second", rows.replace("0.5", "0.7"))):
        (storage / name / "metrics.jsonl").write_text(text)
    picture = storage / "entropy.png"
    arguments = ("runs", "compare", "first", "second", "--storage", storage, "--out", picture)
    store_run(storage, "third", "seed=2", "hyper.lr=0.5")
    (storage / "third" / "metrics.jsonl").write_text(rows.replace("0.5", "0.7"))
    shown = marl_ray(*arguments[:3], "third", *arguments[4:], "--metric", "entropy").stdout.splitlines()
    assert shown[0].split()[4] == "VALUE" and [line.split()[0] for line in shown[1:3]] == ["first", "third"]
    wrong = marl_ray(*arguments, "--metric", "zzz").stderr
    assert "expected one of entropy" in wrong


def test_a_program_compares_runs_as_the_command_does(storage):
    compared = api.compare(["first", "other", "second"], storage=storage)
    assert [[run.name for run in group.runs] for group in compared.groups] == [["other"], ["first", "second"]]
    assert compared.metric == "eval/return" and compared.title == "toys.envs:countdown"
    first = next(row for row in compared.rows if row["run"] == "first")
    assert (first["seed"], first["score"], first["low"], first["algorithm"]) == (1, 1.0, 0.5, "mappo")
    assert str(compared).startswith("other: ippo, seed 0, 3 [") and compared._repr_png_()[1:4] == b"PNG"
    assert (
        api.compare([storage / "first", "other"], storage=storage).rows
        == api.compare(["first", "other"], storage=storage).rows
    )
    with pytest.raises(MarlRayError, match=r"^out: '/proc/no/x.png' cannot be written: "):
        compared.plot("/proc/no/x.png")
    for name in ("x.txt", "x"):
        assert compared.plot(storage.parent / name).read_bytes()[1:4] == b"PNG"
    with pytest.raises(MarlRayError, match=rf"^out: '{storage}' cannot be written: Is a directory$"):
        compared.plot(storage)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"runs": "first"}, "runs: expected a list of names, folders or trained runs, got 'first'"),
        ({"runs": None}, "runs: expected a list of names, folders or trained runs, got None"),
        ({"runs": []}, "runs: expected a list of names, folders or trained runs, got []"),
        ({"runs": ["first", 3]}, "runs: expected a list of names, folders or trained runs, got ['first', 3]"),
        ({"storage": None}, "storage: expected a folder or a URI, got None"),
        ({"metric": ["return"]}, "metric: expected the name of a metric, got ['return']"),
        ({"metric": "eval/retrun"}, "metric: first has no metric 'eval/retrun'; did you mean eval/return"),
        ({"runs": ["first", "first"]}, "runs: expected different names, got first, first"),
    ],
)
def test_a_program_is_told_the_argument_that_cannot_be_compared(storage, arguments, refusal):
    with pytest.raises(MarlRayError) as caught:
        api.compare(**{"runs": ["first", "second"], "storage": storage} | arguments)
    assert str(caught.value).startswith(refusal) and "--" not in str(caught.value)


def test_runs_of_different_metrics_are_not_compared(storage):
    store_run(storage, "elsewhere", "env={id: 'toys.envs:fragile', kwargs: {marker: x, at: 5}}")
    (storage / "other" / "metrics.jsonl").write_text('{"iteration": 1, "steps": 32, "return": 1.0}\n')
    for names, expected in (
        (
            ("first", "elsewhere"),
            "got toys.envs:countdown of first and toys.envs:fragile of elsewhere, whose returns are",
        ),
        (("first", "other"), "--metric: first is measured by eval/return and other is not; expected a metric of both"),
        (("first", "second", "--metric", "eval/retrun"), "--metric: first has no metric 'eval/retrun'; did you mean"),
        (("first", "first"), "runs: expected different names, got first, first"),
    ):
        done = marl_ray("runs", "compare", *names, "--storage", storage, "--out", storage / "no.png")
        assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (storage / "no.png").exists()
