"""The types of JSON and YAML data whose keys no class names, such as configs, manifests and requests."""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = Any
"""The value of a JSON or YAML text. Its reader checks it, or lets a wrong value raise an error."""
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object. Its reader knows the types of its values from the data's format, or checks them."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that its reader does not change."""
JsonSchema: TypeAlias = JsonObject
"""A JSON schema, as the gateway's OpenAPI document is made of them."""
