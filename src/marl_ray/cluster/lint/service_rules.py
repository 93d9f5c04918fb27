"""Rules for RayServices that KubeRay's operator (v1.7.0) checks by its own code, and no schema does."""

from collections.abc import Iterator

import yaml

from marl_ray.cluster.lint.documents import describe_yaml_error, parse_yaml
from marl_ray.cluster.lint.parts import ManifestFault
from marl_ray.json_types import JsonMapping


def service_rules(spec: JsonMapping) -> Iterator[ManifestFault]:
    """Yield the rules for a RayService's own part."""
    cluster = spec.get("rayClusterConfig", {})
    if not cluster:
        yield "spec.rayClusterConfig", "missing key"
    head_service = cluster.get("headGroupSpec", {}).get("headService", {})
    if head_service.get("metadata", {}).get("name"):
        path = "spec.rayClusterConfig.headGroupSpec.headService.metadata.name"
        yield path, "expected none: while one cluster replaces another there are two such Services"
    strategy = spec.get("upgradeStrategy", {})
    kinds = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
    if strategy.get("type", "None") not in kinds:
        yield "spec.upgradeStrategy.type", f"expected one of {', '.join(kinds)}, got {strategy['type']!r}"
    if strategy.get("type") != kinds[1]:
        return
    if not cluster.get("enableInTreeAutoscaling"):
        yield "spec.rayClusterConfig.enableInTreeAutoscaling", "expected true, which an incremental upgrade needs"
    options, where = strategy.get("clusterUpgradeOptions", {}), "spec.upgradeStrategy.clusterUpgradeOptions."
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent")
    if not 0 <= surge <= 100:
        yield f"{where}maxSurgePercent", f"expected 0 to 100, got {surge}"
    if step is None or not 0 <= step <= min(surge, 100):
        yield f"{where}stepSizePercent", f"expected 0 to maxSurgePercent ({surge}), got {step}"
    if options.get("intervalSeconds", 0) <= 0:
        yield f"{where}intervalSeconds", "expected more than 0"
    if not options.get("gatewayClassName"):
        yield f"{where}gatewayClassName", "expected a class of the Gateway API"


def serve_config_rules(spec: JsonMapping) -> Iterator[ManifestFault]:
    """Check that `serveConfigV2` is one YAML document."""
    try:
        documents = parse_yaml(spec.get("serveConfigV2", ""))
    except yaml.YAMLError as error:
        yield "spec.serveConfigV2", describe_yaml_error(error)
        return
    if len(documents) != 1:
        yield "spec.serveConfigV2", f"expected one Serve config, got {len(documents)}"
