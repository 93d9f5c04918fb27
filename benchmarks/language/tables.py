"""The results of `throughput.py` as Markdown."""

from typing import Any

from benchmarks.tables import median_range

RATES = ("tokens_per_second", "tokens_per_cpu_second")
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def table(result: dict[str, Any]) -> str:
    """Return the parts that were measured, as Markdown."""
    parts = [training_lines(result)] if "models" in result else []
    parts += [engine_lines(result["engines"])] if "engines" in result else []
    return "\n".join(["# Language models: tokens per second", *(line for part in parts for line in ("", *part)), ""])


def training_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines about sampling and update."""
    step, threads = result["step"], result["threads"]
    names = {
        f"{side} {precision}": f"{name}, {threads} threads, {PRECISIONS[precision]}"
        for precision in next(iter(result["models"].values()))["best"]
        for side, name in (("ours", "marl-ray"), ("trl", "TRL GRPO"))
    } | {
        "one": "marl-ray, one worker of one thread, float32",
        "two": "marl-ray, two workers of one thread each",
        "apart": "two runs of half a batch each, which never talk",
    }
    lines = [
        "## Sampling and update",
        "",
        f"GRPO, {step['prompts']} prompts x {step['responses']} responses of at most {step['tokens']} tokens, one gradient",
        "step per batch, on the CPU. Medians of the steps after the warm-up; of the rounds, median (least-most). CPU: per",
        "second of processor time of the slowest process: what the clock would say without other users of the machine.",
        "",
        "| model | | tokens/s | tokens per CPU second |",
        "|---|---|---|---|",
    ]
    for preset, part in result["models"].items():
        for key, name in names.items():
            wall, cpu = (median_range([row[key][rate] for row in part["rounds"]]) for rate in RATES)
            lines.append(f"| {preset} | {name} | {wall} | {cpu} |")
    lines += ["", "| model | ratio | wall | CPU |", "|---|---|---|---|"]
    for preset, part in result["models"].items():
        pairs = {
            f"marl-ray / TRL ({setting}), {PRECISIONS[precision]}": (f"ours {precision}", f"trl {precision}")
            for precision, setting in part["best"].items()
        } | {"two workers / one": ("two", "one"), "two that never talk / one: the ceiling": ("apart", "one")}
        for name, pair in pairs.items():
            lines.append(f"| {preset} | {name} | {' | '.join(ratios(part['rounds'], *pair))} |")
    phases = step["phases"]
    lines += [
        "",
        "Where marl-ray's time goes, microseconds per token (CPU):",
        "",
        f"| model | | {' | '.join(phases)} | largest |log-prob difference| |",
    ]
    lines.append("|---" * (len(phases) + 3) + "|")
    for preset, part in result["models"].items():
        for key, name in names.items():
            if key.startswith("trl"):
                continue
            of_key = [row[key] for row in part["rounds"]]
            cells = [median_range([run["phases"][phase][1] for run in of_key]).partition(" ")[0] for phase in phases]
            worst = max(run["log_prob_difference"] for run in of_key)
            lines.append(f"| {preset} | {name} | {' | '.join(cells)} | {worst:.1e} |")
    lines += ["", "| model | TRL setting | tokens/s | tokens per CPU second |", "|---|---|---|---|"]
    for preset, part in result["models"].items():
        for setting, run in part["settings"].items():
            wall, cpu = (f"{run[rate]:,.0f}" for rate in RATES)
            lines.append(f"| {preset} | {setting} | {wall} | {cpu} |")
    return [*lines, "", machine_line(result["machine"])]


def engine_lines(engines: dict[str, Any]) -> list[str]:
    """Return the lines about the engines that sample."""
    lines = [
        "## Engines",
        "",
        f"A call samples {engines['prompts']} x {engines['responses']} responses of at most {engines['tokens']} tokens,",
        "on weights that were written anew. Median of the calls; of the rounds, in which the engines take turns, median",
        "(least-most). The gap is the greatest between a sampled token's log-probability and that of a full forward pass.",
        "",
        "| model | engine | tokens/s | seconds per hand-over of weights | greatest gap of log-probabilities |",
        "|---|---|---|---|---|",
    ]
    for row in engines["rows"]:
        speeds, hand_overs, gaps = (
            [run[key] for run in row["rounds"]] for key in ("tokens_per_second", "hand_over_seconds", "log_prob_gap")
        )
        name = f"{row['engine']}, {engines['threads']} threads, {PRECISIONS[row['precision']]}"
        lines.append(
            f"| {row['preset']} | {name} | {median_range(speeds)} | {median_range(hand_overs, 4)} | {max(gaps):.1e} |"
        )
    before = f"{engines['calls']} calls a round; load before: {engines['load_before']:.1f}."
    return [*lines, "", f"{before} {machine_line(engines['machine'])}"]


def machine_line(machine: dict[str, Any]) -> str:
    return "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."


def ratios(rounds: list[dict[str, Any]], over: str, under: str) -> tuple[str, str]:
    """Return cells of wall time and of CPU time: median (least-most) over the rounds."""
    wall, cpu = (median_range([row[over][rate] / row[under][rate] for row in rounds], 2) for rate in RATES)
    return wall, cpu
