"""Experiments of a gateway over HTTP, for those who run it: a new bundle against the arm that serves, and reports."""

import time
from collections.abc import Iterator

from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import FINAL_STATUSES
from marl_ray.json_types import JsonObject
from marl_ray.serving.client.requests import experiment_path, request_json

WATCH_S = 2.0
"""Seconds between requests of a watched experiment, which a person reads."""


def deploy_bundle(
    url: str,
    bundle: str,
    strategy: str,
    endpoint: str | None,
    options: JsonObject,
    reason: str,
    allow_rolled_back: bool = False,
) -> JsonObject:
    """Start an experiment with the bundle against the arm that serves the endpoint now.

    The bundle is the arm `candidate`, the other is `production`. If nothing serves there, the bundle serves alone.
    An experiment of one arm that is open there ends when the new one begins. `allow_rolled_back` accepts bundles, that of
    `production` too, whose weights another experiment has rolled back. Returns the new experiment's report. Raises
    MarlRayError, and changes nothing, if the gateway cannot load the bundle, or if an experiment of several arms is still
    open at the endpoint.
    """
    arm = {"bundle": bundle} | ({"allow_rolled_back": True} if allow_rolled_back else {})
    endpoints = request_json(url, "/v1/endpoints")["endpoints"]
    if endpoint is None:
        if len(endpoints) != 1:
            raise MarlRayError(f"endpoint: expected one of {', '.join(endpoints) or 'none yet'}, or a new name")
        endpoint = next(iter(endpoints))
    earlier = endpoints.get(endpoint)
    if earlier is None or earlier["production"] is None:
        return request_json(
            url, "/v1/experiments", {"name": endpoint, "arms": {"production": arm}} | options | {"reason": reason}
        )
    current = request_json(url, experiment_path(earlier["experiments"][0]))
    production = _production_arm(url, earlier["production"])
    if allow_rolled_back and "bundle" in production:  # it serves now, whatever became of its weights elsewhere
        production["allow_rolled_back"] = True
    arms = {"production": production, "candidate": arm}
    number = len(earlier["experiments"]) + 1
    config = {"name": f"{endpoint}-{number}", "endpoint": endpoint, "arms": arms, "strategy": strategy}
    # An experiment of one arm compares nothing, so its end disturbs nothing.
    has_one_arm = current["status"] not in FINAL_STATUSES and len(current["arms"]) == 1
    succession = {"succeeds": current["name"]} if has_one_arm else {}
    return request_json(url, "/v1/experiments", config | options | succession | {"reason": reason})


def _production_arm(url: str, production: JsonObject) -> JsonObject:
    """Return the bundle that serves an endpoint, as an arm of the next experiment."""
    config = request_json(url, experiment_path(production["experiment"]))["config"]["arms"][production["arm"]]
    if config["url"] is None:
        return {"bundle": production["bundle"]}
    return {name: config[name] for name in ("url", "model", "api_key_env", "deadline_s", "price")}


def report_lines(report: JsonObject) -> list[str]:
    """Format an experiment as a few lines of text."""
    progress = f"{report['strategy']} stage {report['stage'] + 1}, epoch {report['epoch']}"
    rows = [f"{report['name']}: {report['status']}, {progress}"]
    decision = report["decision"]
    rows += [
        f"  next: {decision['step'].replace('_', ' ')} {decision['arm'] or ''}".rstrip() + f", {decision['reason']}"
    ]
    counts = " ".join(f"{word:>9}" for word in ("exposed", "in window", "judged", "reporting"))
    rows += [f"  {'arm':<16} {'traffic':>8} {counts}  {'mean':>9}  against control"]
    for name, arm in report["arms"].items():
        mean = "-" if arm["mean"] is None else f"{arm['mean']:.4g}"
        note = "control" if name == report["control"] else arm.get("verdict", "")
        if arm.get("difference_interval"):
            low, high = arm["difference_interval"]
            note += f", {arm['difference']:+.4g} [{low:.4g}, {high:.4g}]"
        note += ", rolled back" if arm["rolled_back"] else ""
        counts = " ".join(f"{arm[key]:>9,}" for key in ("exposures", "in_window", "judged", "outcomes"))
        rows.append(f"  {name:<16} {arm['propensity']:>8.1%} {counts}  {mean:>9}  {note}")
    arms = report["arms"].values()
    if any(arm["in_window"] for arm in arms) and not any(arm["judged"] for arm in arms):
        window = report["config"]["outcome_window_s"]
        rows.append(
            f"  no unit is judged yet: each is judged when its window of {window:g} s is over (outcome_window_s)"
        )
    return rows + [f"  warning: {warning}" for warning in report.get("warnings", ())]


def watch(url: str, name: str) -> Iterator[JsonObject]:
    """Yield the experiment's report again and again, until it is over."""
    while True:
        report = request_json(url, experiment_path(name))
        yield report
        if report["status"] in FINAL_STATUSES:
            return
        time.sleep(WATCH_S)
