"""The tables of docs/recipes.md and their pictures, from stored results.

The sentences of the page are its own.
"""

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.records import RESULTS, ROOT
from marl_ray.evaluation.statistics import stratified_bootstrap

PAGE, IMAGES = ROOT / "docs/recipes.md", ROOT / "docs/images"
GIB = 2**30
"""Bytes."""
Curves = Sequence[Sequence[Sequence[float]]]
"""For each seed the points (steps, value) of its evaluations."""


class Recipe(NamedTuple):
    """A row of a table of learning: a config with its changes, and what was measured of it."""

    config: str
    changes: tuple[str, ...]
    learns: str
    scores: Sequence[float]
    """The score of each seed."""
    seconds: Sequence[float]
    curves: Curves
    note: str = ""


SMALL = {
    "gridworld/ippo": ("multigrid_ippo", (), "two agents that share a policy reach a goal on an 8 x 8 grid; at most 1"),
    "gridworld/mappo": ("multigrid_mappo", (), "the same with a critic that sees what both see"),
    "gridworld_grpo": ("multigrid_grpo", (), "the same without a critic, in episodes of at most 64 steps"),
    "gridworld_rloo": ("multigrid_grpo", ("algorithm=rloo",), "likewise"),
    "cartpole": ("cartpole_ppo", (), "CartPole; at most 500"),
    "simple_spread": ("simple_spread_mappo", (), "three agents cover three landmarks (mpe2); the sum of their returns"),
    "dag_ppo_lagrangian": (
        "budget_dag",
        ("train.total_steps=160000",),
        "eight sub-tasks under a budget of 30, by `ppo_lagrangian`; the optimum is 6.529 at a mean cost of 30",
    ),
    "dag_macpo": ("budget_dag", ("train.total_steps=160000", "algorithm=macpo"), "likewise"),
    "dag_guaranteed": (
        "budget_dag",
        ("train.total_steps=160000", "algorithm=macpo", "constraints=[{budget: 30, hard_limit: 31.5}]"),
        "likewise, and no episode above 31.5",
    ),
    "web/click-button": (
        "miniwob_click",
        ("train.total_steps=4096",),
        "clicks the right button of a page in a real Chromium; the share of 100 held-out variants that it solves",
    ),
}
"""Row of a stored table -> its config, changes, and what it learns."""
LANGUAGE = {
    "code_team_grpo": "a generator and a reviewer write small Python functions",
    "code_team_shared": "one model plays both roles",
    "code_sft": "both roles imitate scripted experts, and no more",
    "math_grpo": "sums of two digits: demonstrations teach some of them, rewards the others",
    "preferences_dpo": "the same sums, from preferred pairs alone, after the demonstrations",
    "served_texts": "the same sums, from 4,096 texts that a gateway served and their outcomes, after the demonstrations",
    "webarena_test": "nothing: it shows that a language model can be trained in a real Chromium",
}
NEVER = {
    "webarena_standard": "298 tasks of WebArena, on its shop and forum, by Qwen2.5 3B",
    "webarena_full": "all 812 tasks of WebArena, by Qwen2.5 7B",
    "qwen_coder_team": "programs, by a generator and a reviewer of Qwen2.5-Coder 7B",
    "qwen_react": "questions with a search engine and an interpreter, by Qwen2.5 3B",
}
PARTS = {
    "weights": ("weights",),
    "gradients and moments": ("gradients", "optimizer"),
    "gathered": ("gathered",),
    "activations": ("activations",),
    "reference": ("reference",),
    "copy that samples": ("sampling",),
    "sum": ("total",),
}
"""Column of the table of memory -> the parts of a plan that it sums."""
SWEEPS = {
    "sweeps/algorithms": "eight policy-gradient algorithms on a gridworld",
    "sweeps/gridworld": "thirteen of them, each agent with a policy of its own",
    "sweeps/constrained": "seven constrained algorithms on the task whose optima are known",
    "sweeps/tpe": "hyper-parameters of PPO on CartPole, which Optuna proposes",
    "sweeps/pbt": "a population of six on CartPole",
    "sweeps/language": "five algorithms that teach a small language model sums",
    "sweeps/qwen": "GRPO, RLOO and DAPO for Qwen2.5 3B with tools",
}


def write_page(stored: dict[str, Any]) -> None:
    """Write the tables of the page and its pictures."""
    for name, recipes in (("small", small_recipes()), ("language", language_recipes(stored))):
        draw(
            [recipe for recipe in recipes if any(len(curve) > 1 for curve in recipe.curves)],
            IMAGES / f"recipes_{name}.png",
        )
    PAGE.write_text(fill_tables(PAGE.read_text(), stored))


def fill_tables(page: str, stored: dict[str, Any]) -> str:
    """Return the page with each table between its two marks replaced by that of the stored results."""
    tables = {
        "small": learning_table(small_recipes()),
        "language": learning_table(language_recipes(stored), percent=True),
        "memory": memory_table(stored),
        "sweeps": sweep_table(stored),
    }
    for name, lines in tables.items():
        begin, end = f"<!-- begin {name} -->", "<!-- end -->"
        pattern = re.compile(rf"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)

        def fill(match: re.Match[str], lines: Iterable[str] = lines) -> str:
            return "\n".join([match[1], *lines, match[2]])

        page, count = pattern.subn(fill, page)
        if count != 1:
            raise ValueError(f"{PAGE}: expected {begin} and {end} once, found them {count} times")
    return page


def small_recipes() -> list[Recipe]:
    """Return the recipes of actor-critics, from the tables of other benchmarks."""
    learning = _read_result("learning")
    rows = {row["task"]: row for row in learning["rows"]}
    made = []
    for name, (config, changes, learns) in SMALL.items():
        table, _, part = name.partition("/")
        note = ""
        if table == "gridworld":
            runs = [run for run in _read_result("gridworld_learning")["runs"] if run["algorithm"] == part]
            scores, seconds = [run["final"] for run in runs], []
            curves = [run["curve"] for run in runs]
            solved = sorted(run["solved_at"] for run in runs)
            note = f"; 0.93 after {statistics.median(solved):,.0f} steps (median)"
        elif table == "web":
            runs = [run for run in _read_result("web_learning")["runs"] if run["page"] == part]
            scores, seconds = [run["solved"] for run in runs], [run["seconds"] for run in runs]
            curves = [run["curve"] for run in runs]
        else:
            row = rows[name]
            scores, seconds = row["runs"], [row["seconds"]]
            curves = [learning["curves"][f"{name}/{seed}"] for seed in range(len(scores))]
            if "final" in row:
                costs = [worth[1] for worth in row["final"]["worths"]]
                note = f"; mean cost at the end {min(costs):.1f} to {max(costs):.1f}"
        made.append(Recipe(config, changes, learns, scores, seconds, curves, note))
    return made


def language_recipes(stored: dict[str, Any]) -> list[Recipe]:
    """Return the recipes of language models that two cores can train."""
    made = []
    for name, learns in LANGUAGE.items():
        runs = [run for run in stored["runs"] if run["config"] == name]
        scores, seconds = [run["score"] for run in runs], [run["seconds"] for run in runs]
        first = [run["curve"][0][1] for run in runs if run["curve"]]
        note = f"; {100 * statistics.mean(first):.1f} before" if first else ""
        if name == "code_sft":
            note = ""  # its one evaluation comes after all demonstrations
        made.append(Recipe(name, (), learns, scores, seconds, [run["curve"] for run in runs], note))
    return made


def learning_table(recipes: Sequence[Recipe], percent: bool = False) -> Iterator[str]:
    """Return a table of learning.

    Of fewer than three seeds it shows each score, because an interval of two says nothing.
    """
    yield from ("| config | what it learns | score | seeds | seconds |", "|---|---|---|---|---|")
    for recipe in recipes:
        config = ", ".join(f"`{part}`" for part in (recipe.config, *recipe.changes))
        scores = [score * 100 if percent else score for score in recipe.scores]
        digits = 1 if percent else 3 if max(map(abs, scores), default=0) < 10 else 1
        score = "not measured" if not scores else ", ".join(f"{each:.{digits}f}" for each in scores)
        if len(scores) > 2:
            value, low, high = stratified_bootstrap(np.array(scores)[:, None])
            score = f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
        seconds = f"{statistics.median(recipe.seconds):.0f}" if recipe.seconds else ""
        yield f"| {config} | {recipe.learns} | {score}{recipe.note} | {len(scores) or ''} | {seconds} |"


def memory_table(stored: dict[str, Any]) -> Iterator[str]:
    """Return the memory of recipes that need GPUs, and what each would learn."""
    yield f"| config | what it would learn | GPUs | {' | '.join(PARTS)} |"
    yield "|---|---|---|" + "---|" * len(PARTS)
    for name, learns in NEVER.items():
        plans = [plan for row in stored["plans"] if row["config"] == name for plan in row["plans"]]
        for plan in plans:
            cells = [f"{sum(plan[part] for part in parts) / GIB:.1f}" for parts in PARTS.values()]
            yield f"| `{name}` | {learns} | {plan['gpus']} | {' | '.join(cells)} |"
        if not plans:
            yield f"| `{name}` | {learns} | not planned |" + " |" * len(PARTS)


def sweep_table(stored: dict[str, Any]) -> Iterator[str]:
    """Return the table of sweeps: the aim and the winner of each."""
    yield from (
        "| config | what it compares | trials | winner | its score | seconds |",
        "|---|---|---|---|---|---|",
    )
    rows = {row["config"]: row for row in [_read_halving(), *stored["sweeps"]]}
    for name, compares in SWEEPS.items():
        if name not in rows:
            never = "never run: it needs GPUs, as `qwen_react` does" if name == "sweeps/qwen" else "not measured"
            yield f"| `{name}` | {compares} | | {never} | | |"
            continue
        row = rows[name]
        trials = ", ".join(f"{number} {status}" for status, number in row["trials"].items() if number)
        values = ", ".join(f"`{key}={_format_short(value)}`" for key, value in row["winner"]["values"].items())
        scores = ", ".join(f"{metric} {_format_short(score)}" for metric, score in row["winner"]["scores"].items())
        if row["winner"]["certainty"]:
            scores += f"; {row['winner']['certainty'].partition(':')[0]}"
        yield f"| `{name}` | {compares} | {trials} | {values} | {scores} | {row['seconds']:.0f} |"


def _read_halving() -> dict[str, Any]:
    """Return the sweep of eight algorithms that `sweep.py` measures, with its successive halving, on a quiet machine."""
    sweep = _read_result("sweep")
    ((_, _, scores, _),) = [trial for trial in sweep["trials"] if trial[0] == sweep["halving_winner"]]
    winner = {"values": sweep["halving_winner"], "scores": {"score": statistics.mean(scores)}, "certainty": ""}
    return {"config": "sweeps/algorithms", "trials": {}, "seconds": sweep["halving_seconds"], "winner": winner}


def draw(recipes: Sequence[Recipe], path: Path) -> None:
    """Draw the learning curve of every recipe into one PNG: each seed thin, their mean thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, max(1, len(recipes)))
    rows = -(-len(recipes) // columns)
    figure = Figure(figsize=(10, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, recipe in zip(panels, recipes, strict=False):
        for curve in recipe.curves:
            axes.plot(*zip(*curve, strict=True), color="0.75", linewidth=1, marker=".", markersize=3)
        every = np.unique([steps for curve in recipe.curves for steps, _ in curve])
        shared = every[every <= min(curve[-1][0] for curve in recipe.curves)]
        curves = [tuple(zip(*curve, strict=True)) for curve in recipe.curves]
        mean = np.mean([np.interp(shared, steps, values) for steps, values in curves], axis=0)
        axes.plot(shared, mean, color="tab:blue", linewidth=1.8)
        changed = [change for change in recipe.changes if not change.startswith("train.")]
        axes.set_title("\n".join([recipe.config, *changed]), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(recipes) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=90)


def _format_short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _read_result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())
