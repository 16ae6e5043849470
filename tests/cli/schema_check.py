"""As much of JSON Schema (2020-12) as the shipped schemas use, so that tests need no further library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
TEXTS_ONLY = {"$schema", "title", "description", "examples", "$defs"}
KNOWN = {
    "$ref", "type", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items",
    "prefixItems", "minItems", "maxItems", "uniqueItems", "pattern", "minimum",
}  # fmt: skip


def faults(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], place: str = "$") -> Iterator[str]:
    """Where the value is not what the schema says. A keyword that is not known here fails the test."""
    assert set(schema) <= KNOWN | TEXTS_ONLY, set(schema) - KNOWN - TEXTS_ONLY
    if "$ref" in schema:
        yield from faults(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, place)
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r}"
    if "anyOf" in schema and all(list(faults(value, one, root, place)) for one in schema["anyOf"]):
        yield f"{place}: {value!r} is none of the forms"
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(isinstance(value, TYPES[name]) and (type(value) is not bool or name == "boolean") for name in names):
            yield f"{place}: {value!r} is not {' or '.join(names)}"
            return
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r}"
    if isinstance(value, int) and "minimum" in schema and value < schema["minimum"]:
        yield f"{place}: {value!r}"
    if isinstance(value, list):
        yield from _in_list(value, schema, root, place)
    if isinstance(value, dict):
        yield from _in_object(value, schema, root, place)


def _in_list(value: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any], place: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{place}: {len(value)} entries"
    if schema.get("uniqueItems") and len({str(entry) for entry in value}) < len(value):
        yield f"{place}: repeats"
    before = schema.get("prefixItems", [])
    for n, entry in enumerate(value):
        yield from faults(entry, before[n] if n < len(before) else schema.get("items", {}), root, f"{place}[{n}]")


def _in_object(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], place: str) -> Iterator[str]:
    yield from (f"{place}.{name}: missing" for name in schema.get("required", ()) if name not in value)
    for name, entry in value.items():
        below = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
        if below is False:
            yield f"{place}.{name}: not in the schema"
        else:
            yield from faults(entry, below, root, f"{place}.{name}")
