"""The type of a JSON schema, as the OpenAPI document is made of them."""

from marl_ray.json_types import JsonObject

JsonSchema = JsonObject
