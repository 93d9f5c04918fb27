"""Small policies learn pages of MiniWoB++ in a real browser, by the commands that a user types.

    .venv/bin/python -m benchmarks.learning.miniwob                        every page, three seeds
    .venv/bin/python -m benchmarks.learning.miniwob --pages click-tab      some of them

Every run is `marl-ray train jobs/configs/miniwob_click.yaml` on one page; then `marl-ray evaluate` lets its best bundle
do the page's held-out variants, which no run has seen, with the likeliest action of every step. A run that is in the stored
table already is not repeated, unless `--again` is given. Writes `benchmarks/results/web_learning.{json,md}` after every run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import RESULTS, ROOT, load_before, machine
from marl_ray.evaluation.statistics import stratified_bootstrap

PAGES = {
    "click-test": 1536,
    "click-test-2": 2048,
    "focus-text": 1536,
    "click-dialog": 2048,
    "click-button": 4096,
    "click-tab": 4096,
    "enter-text": 4096,
    "click-checkboxes": 6144,
    "click-link": 4096,
    "click-option": 6144,
}
"""Pages, and the steps of their runs."""
VARIANTS = 100
"""Held-out variants of a page."""
GOAL, LIMIT_S = 0.9, 1200.0
"""The goal of every page: the share of variants that are solved, in the mean of its seeds, and the seconds of a run."""


def learn(page: str, seed: int) -> dict[str, Any]:
    """Train one seed on two workers, then play the held-out variants."""
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
        config = [f"env.kwargs.tasks=[{page}]", f"train.total_steps={PAGES[page]}", f"seed={seed}"]
        config += [f"storage={folder}", f"name={page}"]
        begun = time.perf_counter()
        _command("train", "jobs/configs/miniwob_click.yaml", *config)
        seconds = time.perf_counter() - begun
        rows = [json.loads(line) for line in Path(folder, page, "metrics.jsonl").read_text().splitlines()]
        played = [
            "--benchmark",
            "miniwob",
            "--policy",
            f"{folder}/{page}/bundle",
            "--greedy",
            "--out",
            f"{folder}/played",
        ]
        played += ["--env", f"tasks=[{page}]", "--env", f"held_out={VARIANTS}", "--env", "max_steps=8"]
        _command("evaluate", *played)
        report = json.loads(Path(folder, "played", "report.json").read_text())
    return {
        "page": page,
        "seed": seed,
        "solved": report["all"]["solved"] / report["all"]["episodes"],
        "endings": {name: ending["episodes"] for name, ending in report["endings"].items()},
        "actions": report["all"]["actions"],
        "steps": rows[-1]["steps"],
        "seconds": seconds,
        "curve": [[row["steps"], round(row["return"], 4)] for row in rows if "return" in row],
    }


def _command(*arguments: str) -> None:
    """Run `marl-ray` as a user does. Raises subprocess.CalledProcessError, with its output on the screen."""
    ended = subprocess.run(
        [sys.executable, "-m", "marl_ray", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    if ended.returncode:
        print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)
        ended.check_returncode()


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "# Learning in a browser",
        "",
        f"Share of {VARIANTS} held-out variants of each page that the best bundle solves: mean of the seeds, with its 95 %",
        "stratified bootstrap interval, and each seed. A run is one `marl-ray train`, from start to exit, on two workers.",
        "",
        "| page | solved | seeds | steps | actions per episode | seconds of a run | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for page in PAGES:
        page_runs = [run for run in runs if run["page"] == page]
        if not page_runs:
            continue
        solved = [run["solved"] for run in page_runs]
        value, low, high = stratified_bootstrap(np.array(solved)[:, None])
        seconds = [f"{run['seconds']:.0f}" for run in page_runs]
        met = np.mean(solved) >= GOAL and max(run["seconds"] for run in page_runs) < LIMIT_S
        lines.append(
            f"| `{page}` | {value:.3f} ({low:.3f} - {high:.3f}) | {', '.join(f'{share:.2f}' for share in solved)} "
            f"| {page_runs[0]['steps']:,} | {np.mean([run['actions'] for run in page_runs]):.1f} "
            f"| {', '.join(seconds)} | {'yes' if met else 'no'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="repeat runs that are stored already")
    options = parser.parse_args()
    described, path = machine(), RESULTS / "web_learning.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    for seed in range(options.seeds):
        for page in options.pages:
            if not options.again and any(run["page"] == page and run["seed"] == seed for run in runs):
                continue
            busy = load_before()
            row = learn(page, seed) | {"load_before": busy}
            print(
                f"{page}, seed {seed}: {row['solved']:.2f}, {row['steps']:,} steps, {row['seconds']:.0f} s", flush=True
            )
            runs = [other for other in runs if (other["page"], other["seed"]) != (page, seed)] + [row]
            runs.sort(key=lambda other: (list(PAGES).index(other["page"]), other["seed"]))
            path.write_text(json.dumps({"machine": described, "runs": runs}) + "\n")
            text = table(runs)
            text += "\nMachine: " + ", ".join(f"{k} {v}" for k, v in described.items() if isinstance(v, str | int))
            text += f". Processes that wanted a core when a run began: {min(o['load_before'] for o in runs):.1f} to "
            text += f"{max(o['load_before'] for o in runs):.1f}.\n"
            (RESULTS / "web_learning.md").write_text(text)
    print(table(runs))


if __name__ == "__main__":
    main()
