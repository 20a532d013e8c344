"""From a pydantic model to a structural OpenAPI schema, as the API server demands it: no references, no nulls."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_DROPPED = frozenset({"title", "additionalProperties", "$defs", "propertyNames", "default"})


def structural_schema(model: type[BaseModel], *, defaults: bool) -> Schema:
    """The schema of one model by its camelCase names, with references inlined and nullable branches folded.

    With `defaults`, static defaults stand in the schema, so that `kubectl get -o yaml` shows what is in force.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _Converter(schema.get("$defs", {}), defaults=defaults).convert(schema)


class _Converter:
    """Walks one JSON schema."""

    def __init__(self, definitions: dict[str, Schema], *, defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults

    def convert(self, schema: Schema) -> Schema:
        """The structural form of any node."""
        if "$ref" in schema:
            target = self._definitions[schema["$ref"].rpartition("/")[2]]
            return self.convert(target | {key: value for key, value in schema.items() if key != "$ref"})
        if "x-kubernetes-int-or-string" in schema:
            return {key: value for key, value in schema.items() if key not in _DROPPED} | self._default(schema)
        if "anyOf" in schema:
            (branch,) = (branch for branch in schema["anyOf"] if branch != {"type": "null"})
            return self.convert(branch | {key: value for key, value in schema.items() if key != "anyOf"})
        return self._convert_plain(schema)

    def _convert_plain(self, schema: Schema) -> Schema:
        result: Schema = {key: value for key, value in schema.items() if key not in _DROPPED | {"const"}}
        if "const" in schema:
            result["enum"] = [schema["const"]]
        if "items" in schema:
            result["items"] = self.convert(schema["items"])
        if isinstance(schema.get("additionalProperties"), dict):
            result["additionalProperties"] = self.convert(schema["additionalProperties"])
        if "properties" in schema:
            required = schema.get("required", [])
            result["properties"] = {
                name: self.convert(inner) if name in required else self._optional(inner)
                for name, inner in schema["properties"].items()
            }
        return result | self._default(schema)

    def _optional(self, schema: Schema) -> Schema:
        """An object that the models make up when it is absent: an empty default lets those of its fields apply."""
        result = self.convert(schema)
        can_be_absent = "anyOf" in schema
        inner = result.get("properties", {}).values()
        if self._defaults and not can_be_absent and any("default" in value for value in inner):
            result["default"] = {}
        return result

    def _default(self, schema: Schema) -> Schema:
        value = schema.get("default")
        return {"default": value} if self._defaults and value not in (None, []) else {}
