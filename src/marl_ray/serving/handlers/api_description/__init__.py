"""The gateway's OpenAPI document."""
