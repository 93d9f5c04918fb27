"""Rules for RayJobs and RayCronJobs that KubeRay's operator (v1.7.0) checks by its own code, and advice about them."""

import re
from collections.abc import Iterator, Mapping

import yaml

from marl_ray.cluster.lint.parts import ManifestFault, groups
from marl_ray.config.kubernetes import is_schedule, is_time_zone
from marl_ray.config.load import YamlLoader
from marl_ray.json_types import JsonMapping

SELECTOR_KEY = "ray.io/cluster"
"""Key of `clusterSelector` that names the cluster."""
DELETION_POLICIES = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
"""Policies of deletion: what a later one deletes includes what an earlier one does."""
_SCHEDULE_WORD = re.compile(
    r"@(yearly|annually|monthly|weekly|daily|midnight|hourly|every [-+]?((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))+)"
)
"""Words that KubeRay's parser takes in place of five fields."""
_CLUSTER_ONLY = ("DeleteWorkers", "DeleteCluster")
"""Policies for a cluster that the job made itself."""
_LOCAL_VOLUMES = ("emptyDir", "hostPath")
"""Kinds of volumes that end with a pod or stay on a machine."""


def job_rules(spec: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Yield the faults of a RayJob's own part, which stands at `where` (with a dot at its end)."""
    mode, selector = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    modes = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
    if mode not in modes:
        yield f"{where}submissionMode", f"expected one of {', '.join(modes)}, got {mode!r}"
    if not spec.get("rayClusterSpec") and not selector:
        yield f"{where}rayClusterSpec", "expected it, or clusterSelector"
    if not spec.get("entrypoint") and mode != "InteractiveMode" and not spec.get("submitterPodTemplate"):
        yield f"{where}entrypoint", "missing key"
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield f"{where}shutdownAfterJobFinishes", "expected true beside suspend"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key) is not None and spec[key] <= 0:
            yield f"{where}{key}", f"expected more than 0, got {spec[key]}"
    for key in ("backoffLimit", "ttlSecondsAfterFinished"):
        if spec.get(key, 0) < 0:
            yield f"{where}{key}", f"expected 0 or more, got {spec[key]}"
    submitter = spec.get("submitterPodTemplate", {"spec": {"restartPolicy": "Never"}})["spec"]
    if mode == "K8sJobMode" and submitter.get("restartPolicy") not in ("Never", "OnFailure"):
        yield f"{where}submitterPodTemplate.spec.restartPolicy", "expected Never or OnFailure, as a Job's pod has"
    if selector:
        yield from _selector_rules(spec, selector, mode, where)
    if spec.get("backoffLimit", 0) > 0 and mode == "InteractiveMode":
        yield f"{where}backoffLimit", "expected 0 in InteractiveMode"
    if mode == "SidecarMode":
        yield from _sidecar_rules(spec, where)
    yield from _deletion_rules(spec, where)
    yield from _runtime_env_rules(spec, where)


def cron_job_rules(spec: JsonMapping) -> Iterator[ManifestFault]:
    """Yield the rules for a RayCronJob's own part."""
    schedule = spec["schedule"]
    if not (_SCHEDULE_WORD.fullmatch(schedule) or is_schedule(schedule)):
        yield "spec.schedule", f"expected five fields of cron, got {schedule!r}"
    if "timeZone" in spec and not is_time_zone(spec["timeZone"]):
        yield "spec.timeZone", f"expected the name of a time zone such as Europe/Berlin, got {spec['timeZone']!r}"
    yield from job_rules(spec["jobTemplate"], "spec.jobTemplate.")


def _selector_rules(spec: JsonMapping, selector: Mapping[str, str], mode: str, where: str) -> Iterator[ManifestFault]:
    if not selector.get(SELECTOR_KEY):
        yield f"{where}clusterSelector", f"expected {SELECTOR_KEY} with the name of a RayCluster"
    if mode == "SidecarMode":
        yield f"{where}clusterSelector", "expected none in SidecarMode"
    if spec.get("suspend"):
        yield f"{where}suspend", "expected none beside clusterSelector"
    if spec.get("backoffLimit", 0) > 0:
        yield f"{where}backoffLimit", "expected 0 beside clusterSelector: a retry is a new cluster"


def _sidecar_rules(spec: JsonMapping, where: str) -> Iterator[ManifestFault]:
    for key in ("submitterPodTemplate", "submitterConfig"):
        if key in spec:
            yield f"{where}{key}", "expected none in SidecarMode"
    head = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {}).get("spec", {})
    if head.get("restartPolicy", "Never") != "Never":
        yield f"{where}rayClusterSpec.headGroupSpec.template.spec.restartPolicy", "expected Never in SidecarMode"


def _deletion_rules(spec: JsonMapping, where: str) -> Iterator[ManifestFault]:
    shuts_down, strategy = spec.get("shutdownAfterJobFinishes"), spec.get("deletionStrategy")
    if spec.get("ttlSecondsAfterFinished", 0) and not shuts_down:
        yield f"{where}ttlSecondsAfterFinished", "expected shutdownAfterJobFinishes: true beside it"
    if strategy is None:
        return
    strategy_path, rules = f"{where}deletionStrategy.", strategy.get("deletionRules") or []
    legacy_keys = [key for key in ("onSuccess", "onFailure") if key in strategy]
    if rules and shuts_down:
        yield f"{where}shutdownAfterJobFinishes", "expected none beside deletionStrategy.deletionRules"
    if rules and legacy_keys:
        yield f"{strategy_path}{legacy_keys[0]}", "expected none beside deletionRules"
    if not rules and len(legacy_keys) < 2:
        yield f"{where}deletionStrategy", "expected deletionRules, or onSuccess and onFailure"
    policies = [(f"{strategy_path}deletionRules.{k}.policy", rule["policy"]) for k, rule in enumerate(rules)]
    policies += [(f"{strategy_path}{key}.policy", strategy[key].get("policy", "")) for key in legacy_keys]
    for path, policy in policies:
        if not policy:
            yield path, "missing key"
        if spec.get("clusterSelector") and policy in _CLUSTER_ONLY:
            yield path, f"expected another than {policy} beside clusterSelector"
        if policy == "DeleteWorkers" and spec.get("rayClusterSpec", {}).get("enableInTreeAutoscaling"):
            yield path, "expected another than DeleteWorkers with enableInTreeAutoscaling"
        if policy == "DeleteNone" and legacy_keys and shuts_down:
            yield path, "expected another than DeleteNone beside shutdownAfterJobFinishes"
    yield from _deletion_order_rules(rules, strategy_path)


def _deletion_order_rules(rules: list[JsonMapping], strategy_path: str) -> Iterator[ManifestFault]:
    """Yield the faults of a job's rules for deletion.

    Each end and policy must have one rule, and what is deleted first must include nothing that is deleted later.
    """
    ttls_by_end: dict[tuple[str, str], dict[str, int]] = {}
    for k, rule in enumerate(rules):
        condition = rule["condition"]
        ends = [(key, condition[key]) for key in ("jobStatus", "jobDeploymentStatus") if key in condition]
        if len(ends) != 1:
            yield f"{strategy_path}deletionRules.{k}.condition", "expected either jobStatus or jobDeploymentStatus"
            continue
        end = ends[0]
        ttl_s, ttls_by_policy = condition.get("ttlSeconds", 0), ttls_by_end.setdefault(end, {})
        if rule["policy"] in ttls_by_policy:
            yield f"{strategy_path}deletionRules.{k}", f"expected one rule for {rule['policy']} and {end[1]}"
        for other, other_ttl_s in ttls_by_policy.items():
            if {rule["policy"], other} <= set(DELETION_POLICIES):
                first, last = sorted(
                    [(DELETION_POLICIES.index(rule["policy"]), ttl_s), (DELETION_POLICIES.index(other), other_ttl_s)]
                )
                if first[1] > last[1]:
                    names = f"{DELETION_POLICIES[last[0]]} after {DELETION_POLICIES[first[0]]}"
                    yield f"{strategy_path}deletionRules.{k}.condition.ttlSeconds", f"expected {names}"
        ttls_by_policy[rule["policy"]] = ttl_s


def _runtime_env_rules(spec: JsonMapping, where: str) -> Iterator[ManifestFault]:
    try:
        runtime_env = read_runtime_env(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError as error:
        yield f"{where}runtimeEnvYAML", f"expected YAML ({' '.join(str(error).split())})"
        return
    if not isinstance(runtime_env, Mapping):
        yield f"{where}runtimeEnvYAML", "expected a mapping of keys"


def read_runtime_env(text: str) -> object:
    """Return the content of a `runtimeEnvYAML`, which should be a mapping. Raises yaml.YAMLError."""
    return yaml.load(text or "{}", YamlLoader)  # noqa: S506  it extends the safe one


def advice_for_job(spec: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Yield the advice about a job that would lose work.

    A retry is a new cluster, without the files that pods wrote to their own folders.
    """
    cluster = spec.get("rayClusterSpec")
    if not cluster or spec.get("backoffLimit", 0) <= 0 or "://" in spec.get("entrypoint", ""):
        return
    kinds = {
        kind
        for _, group in groups(cluster, "")
        for volume in group["template"]["spec"].get("volumes", [])
        for kind in volume.keys() - {"name", *_LOCAL_VOLUMES, "configMap", "secret", "projected", "downwardAPI"}
    }
    if not kinds:
        yield (
            f"{where}backoffLimit",
            "expected storage outside of the cluster (a claim, or a URL in the entrypoint): a retry is a new cluster",
        )
