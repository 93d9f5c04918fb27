"""The schemas of KubeRay's kinds as they are stored."""

from marl_ray.cluster.lint.schemas import minimise, schemas


def test_equal_parts_of_a_schema_are_stored_once():
    part = {
        "type": "object",
        "description": "long",
        "properties": {"name": {"type": "string"}, "kind": {"type": "string", "default": ""}},
    } | {"required": ["name", "kind"]}
    spec = {"type": "object", "properties": {"a": part, "b": {"type": "array", "items": part}}}
    schema = {"type": "object", "properties": {"spec": spec, "status": {"type": "object"}, "metadata": {}}}
    versions = [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]
    small = minimise([{"spec": {"names": {"kind": "Thing"}, "versions": versions}}])
    (name,) = (name for name, shared in small["$defs"].items() if shared.get("required") == ["name"])
    reference = {"$ref": f"#/$defs/{name}"}
    assert small["$defs"][name] == {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "kind": {"type": "string"}},
        "additionalProperties": False,
    }
    thing = small["kinds"]["Thing"]["properties"]["spec"]["properties"]
    assert thing == {"a": reference, "b": {"type": "array", "items": reference}}
    assert "Apache License 2.0" in schemas()["$comment"]
