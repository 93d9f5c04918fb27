"""The forms of the documents that commands print with --json."""

EXPERIMENT_FORM = {
    "name, status, strategy, stage, epoch": "The experiment, and where its ramp is.",
    "arms": "Arm -> traffic, counts of units, mean, verdict, and difference to the control with its interval.",
    "control": "The arm that the others are compared with.",
    "decision": "The next step, its arm and the reason.",
    "warnings": "Sentences, if there are any.",
    "...": "All that `GET /v1/experiments/NAME` answers.",
}
RESULT_FORM = {
    "name": "The run.",
    "model": "`models:/name/version` of the best bundle.",
    "bundle": "Folder or URI of the best bundle.",
    "curve": "Path of the picture; null on remote storage.",
    "tracking_uri, run_id": "The MLflow run.",
    "best_return": "Mean return of the best bundle, on other episodes than those that chose it; null if nothing was played.",
    "metrics": "Metric -> value after the last iteration.",
    "summary": "Lines for people.",
    "trained": "False if the run had played all its steps already.",
}
STATE_FORM = {
    "resource": "KIND/NAME.",
    "phase": "waiting, running, ready, suspended, succeeded, failed or gone.",
    "reason, message": "The operator's word and line.",
    "status": "Exit status of a RayJob's entrypoint, or null.",
}
JOB_FORM = {
    "name": "The run or sweep.",
    "job": "The job's id; `rayjob/NAME` with --kuberay.",
    "status": "Exit status of the job, and of this command.",
}
FORMS: dict[str, dict[str, str]] = {
    "train": RESULT_FORM | {"...": "With --dry-run the resolved config instead."},
    "plan": {
        "rows": "Policy -> sequences of a pass.",
        "plans": "Of each number of `gpus` the bytes of one GPU: `weights`, `gradients`, `optimizer`, `gathered`, "
        "`activations`, `reference`, `sampling`, their `total`, and `resting`, what stays between steps; and `main_memory` "
        "of a worker with `cpu_offload`.",
    },
    "try": {
        "before, after": "Mean return before training, and of the best bundle on other starts: value, low, high.",
        "episodes": "Number of the episodes of `after`.",
        "over_http": "Mean return of the episodes over HTTP.",
        "action_ms": "Median milliseconds of an action over HTTP.",
        "model, bundle, curve": "The best bundle, and the picture of the curve.",
        "url, key": "The gateway, and its admin key.",
        "storage": "The folder that holds the run's: `--storage` of `runs show try`.",
        "seconds": "Until the gateway served.",
    },
    "demo": {
        "experiments": "Of each `report` (as of `experiment status`), `audit` (as of `experiment audit`), `episodes`, and "
        "`latencies_ms`: arm -> median and 99th percentile of an action.",
        "curves, tracking_uri, database": "Where the learning curves, the runs and the experiments are.",
        "url, key, dashboard, token": "The gateway with its admin key, and Ray's dashboard with its token.",
    },
    "runs ls": {
        "[].name, [].kind": "The run or sweep; `run`, `sweep`, or `attempt` at either that has written no record yet.",
        "[].state": "finished, running, starting, failed, interrupted, died or unfinished.",
        "[].algorithm, [].env, [].seed": "From its config.",
        "[].steps, [].total_steps": "Environment steps played, and those of the config.",
        "[].score": "`value`, `low` and `high` (its 95 % interval), `episodes` (which were scored); null if there is none.",
        "[].at": "Time of its last sign, in seconds since 1970.",
        "[].storage": "Folder or URI.",
    },
    "runs show": {
        "summary": "As of `runs ls`.",
        "error": "Why the last attempt failed, or null.",
        "warnings": "What is wrong with a run that does not learn, and the keys to change; empty for one that learns.",
        "given": "The keys of the config that were given.",
        "config": "With every default written out.",
        "bundle, model": "The best bundle, and its version in the registry; null if there is none.",
        "checkpoints": "`path`, `iteration` and `steps` of each.",
        "mlflow": "`run_id` and `uri`.",
        "curve, log, errors": "Files.",
    },
    "runs resume": RESULT_FORM,
    "runs rm": {
        "name, folder": "What was deleted.",
        "files, bytes, checkpoints": "What it held.",
        "mlflow_run_id": "The MLflow run, which stays.",
    },
    "runs compare": {
        "metric": "The metric of the curves.",
        "picture": "Path of the PNG.",
        "groups": "Runs that differ in their seed alone: `label`, `score` (as of `runs ls`), `differences` (given key "
        "in which the groups differ -> value, null for the default), and of each of `runs` name, "
        "algorithm, seed, metric, `points` (steps, value), `intervals` (steps, low, high) and score.",
    },
    "sweep": {
        "name, status, error": "The sweep, and how it ended.",
        "trials": "Status -> number of trials.",
        "steps, seconds": "Played by all trials and seeds; wall time.",
        "winner": "`trial`, `values`, `scores`, `seed`, `model`, and as `certainty` a line about the trials that no test "
        "tells from it; null if no trial has a result.",
        "ranking": "Of each trial with a result, the best first: `trial`, `values`, `scores`, and as `interval` that of the "
        "first metric over the seeds, null of one seed.",
        "report, records": "Files.",
        "...": "With --dry-run `trials` (the values of each), `seeds`, `scheduler` and `search` instead.",
    },
    "report": {"report": "The file."},
    "evaluate": {
        "evaluation": "What was measured: benchmark, data, mode, settings.",
        "scores": "Mode -> number, such as pass@1 -> `value`, `low`, `high`.",
        "samples, problems, filtered": "Counts, and the problems that were left out.",
        "suspected_hacks, flagged, verdicts, levels, not_judged, without_reference": "What the judges saw.",
        "folder": "Folder of `report.json` and `report.md`, which also have every problem.",
        "marl_ray, python": "Versions.",
        "score, interval": "With `--episodes` alone: the mean return, and its 95 % interval, null of one episode.",
        "returns, lengths, truncated": "With `--episodes` alone: return and steps of each; how many `max_steps` truncated.",
    },
    "aggregate": {
        "number, mode": "The averaged number, and its mode.",
        "value, low, high": "The weighted mean, and its interval.",
        "parts": "`variant`, `value` and `weight` of each evaluation.",
    },
    "tasks": {"[]": "The lines that are printed without `--json`, each an object."},
    "serve": {"urls": "Application -> URL."},
    "deploy": EXPERIMENT_FORM,
    "experiment create": EXPERIMENT_FORM,
    "experiment ls": {
        "[].name, [].status, [].epoch": "The experiment.",
        "[].arms": "Arm -> share of the traffic.",
        "...": "All that `GET /v1/experiments` answers.",
    },
    "experiment status": EXPERIMENT_FORM,
    "experiment watch": EXPERIMENT_FORM,
    "experiment audit": {
        "[].at, [].epoch": "Time of the change, and the epoch that it began.",
        "[].action, [].arm, [].actor, [].reason": "The change, its arm, who made it, and why.",
        "...": "All that `GET /v1/experiments/NAME/audit` answers.",
    },
    "experiment plan": {
        "effect, sd, power": "The gain to be proven, the deviation of the outcomes, and the chance to find it.",
        "test": "The test that decides at every look: exact or sequential.",
        "units": "`fixed` (one look), `median` and `sure` (every look): units of both arms, or null if over a billion.",
        "per_day": "Units of the last day, or null.",
    },
    "experiment analyse": {
        "experiment, status, epoch": "The experiment.",
        "level, units, control, covariate": "Level of the tests, kind of the units, the control, and CUPED's covariate.",
        "notes": "Sentences about what does not count.",
        "comparisons": "Of each metric and treatment: `metric`, `arm`, `treatment`, `control`, `test` (Welch's), `holm`, "
        "`adjusted` (CUPED's, or null) and `always` (exact bounds, or null).",
    },
    "experiment off-policy": {
        "value, doubly_robust": "`estimate`, `low` and `effective` units.",
        "logged, units, greedy_units": "Mean outcome of the units used, their number, and those left out.",
        "gate": "`passed` and the `reason`.",
    },
    **{
        f"experiment {change}": EXPERIMENT_FORM
        for change in ("start", "next-stage", "pause", "resume", "promote", "rollback", "stop")
    },
    "export": {
        "path": "The file.",
        "units, sequences, decisions": "Counts of what it has.",
        "censored, mixed": "Units that were left out: without an outcome, and with acts of another bundle.",
    },
    "submit train": JOB_FORM,
    "submit sweep": JOB_FORM,
    "lint": {
        "files": "Number of files.",
        "passed": "False if the exit status is 2.",
        "findings": "`text` of each, and `advice`: false if it makes the exit status 2.",
    },
    "cluster lint": {"files, passed, findings": "As of `lint`."},
    "cluster render": {"[].apiVersion, [].kind, [].metadata": "The manifests.", "...": "The rest of each."},
    "cluster apply": {"dry_run": "True if nothing was kept.", "applied": "KIND/NAME of each manifest."},
    "cluster status": STATE_FORM,
    "cluster wait": STATE_FORM,
    "cluster delete": {"resource": "KIND/NAME.", "gone": "False if it was only asked to end (--timeout-s 0)."},
    "new": {"files": "What was written.", "next": "The commands that use it."},
    "check plugin": {
        "kind, name": "The part.",
        "passed": "False if a property does not hold; the exit status is 1 then.",
        "properties": "`name`, `text` (what must hold) and `failure` (what differs, or null) of each.",
    },
    "algorithms": {
        "[].name, [].title, [].paper": "The algorithm.",
        "[].needs": "Demands on a run, in words.",
        "[].updates": "simultaneous or sequential.",
        "[].language_models": "True if it also trains these.",
        "...": "With NAME one of these, with `hyper`: `key`, `default`, `of_language_models`, `own`, `description`.",
    },
    "config schema": {"...": "The schema."},
    "config reference": {
        "run, sweep, experiment, gateway, cluster": "`key`, `type`, `default` and `description` of each key."
    },
}
"""Command -> key of its document -> meaning. `[]` stands for each entry of a list; `...` for what else there may be."""
