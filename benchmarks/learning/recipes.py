"""The shipped configs are trained on this machine, for the numbers and pictures of docs/recipes.md.

    .venv/bin/python -m benchmarks.learning.recipes                     what the stored table lacks, then write the page
    .venv/bin/python -m benchmarks.learning.recipes --only math_grpo    some of them, again
    .venv/bin/python -m benchmarks.learning.recipes --write             the page alone

Every run is `marl-ray train` or `marl-ray sweep` of a config as it is shipped. Scores of small policies are those of
`returns.py`, `gridworld.py --learning` and `miniwob.py`. Writes `results/recipes.json` after every run, then
docs/recipes.md and its pictures.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learning.recipe_page import write_page
from benchmarks.learning.recipe_runs import plan_recipe, run_recipe, sweep_recipe
from benchmarks.learning.recipe_serving import serve_texts
from benchmarks.records import RESULTS, machine

RUNS = {
    "math_grpo": "pass_at_1",
    "code_sft": "pass_at_1",
    "code_team_grpo": "pass_at_1",
    "code_team_shared": "pass_at_1",
    "preferences_dpo": "pass_at_1",
    "served_texts": "pass_at_1",
    "webarena_test": "pass_at_1",
}
"""Config -> the metric of its evaluations; those of small policies have stored tables of their own."""
SERVED = {"served_texts": serve_texts}
"""Config -> what makes its `data`."""
SWEEPS = ("sweeps/algorithms", "sweeps/gridworld", "sweeps/constrained", "sweeps/tpe", "sweeps/pbt", "sweeps/language")
PLANS = {"qwen_coder_team": [4, 8], "qwen_react": [4, 8], "webarena_standard": [4, 8], "webarena_full": [8, 16]}
"""Config that needs GPUs -> numbers of them."""
STORED = RESULTS / "recipes.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=[*RUNS, *SWEEPS, *PLANS], help="measure these, again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the page of what is stored, and measure nothing")
    options = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"runs": [], "sweeps": [], "plans": []}
    if not options.write:
        stored["machine"] = machine()
        for seed in range(options.seeds):
            for name, metric in RUNS.items():
                if is_due(stored["runs"], options.only, config=name, seed=seed):
                    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
                        store(stored, "runs", run_recipe(name, metric, seed, Path(folder), SERVED.get(name)))
        for name in SWEEPS:
            if is_due(stored["sweeps"], options.only, config=name):
                with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
                    store(stored, "sweeps", sweep_recipe(name, Path(folder)))
        for name, gpus in PLANS.items():
            if is_due(stored["plans"], options.only, config=name):
                store(stored, "plans", plan_recipe(name, gpus))
    write_page(stored)


def is_due(rows: list[dict[str, Any]], only: list[str] | None, **keys: Any) -> bool:
    """Return True for what was asked for by name, or else for what no stored row has."""
    return keys["config"] in only if only else not any(keys.items() <= row.items() for row in rows)


def store(stored: dict[str, Any], part: str, row: dict[str, Any]) -> None:
    """Put a row in place of the one of the same config and seed, with its processor, and write all of them."""
    row["cpu"] = stored["machine"]["cpu"]
    print(", ".join(f"{key} {value}" for key, value in row.items() if isinstance(value, str | int | float)), flush=True)
    key = (row["config"], row.get("seed"))
    rows = [other for other in stored[part] if (other["config"], other.get("seed")) != key]
    stored[part] = sorted([*rows, row], key=lambda other: (other["config"], other.get("seed") or 0))
    STORED.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
