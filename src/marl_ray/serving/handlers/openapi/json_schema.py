"""The type of a JSON schema, as the OpenAPI document is made of them."""

from typing import Any

JsonSchema = dict[str, Any]
