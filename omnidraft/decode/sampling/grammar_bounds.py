"""Bounds of a grammar: bytes, depth, properties and references, checked before native code reads it."""

import json
from typing import Any

from omnidraft.decode.sampling.json_limits import JsonLimits
from omnidraft.errors import RequestError

MAX_BYTES = 65_536
MAX_PROPERTIES = 1_000
"""Keys under `properties`, `patternProperties` and the like, and definitions, in the whole schema."""
MAX_REFS = 1_000
SCHEMA_LIMITS = JsonLimits(num_values=20_000, depth=64)
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def check_regex(text: str) -> None:
    """Raise RequestError for a regular expression that is too long, or contains half of a surrogate pair."""
    _check_bytes("regex", text)


def checked_schema(text: str) -> dict[str, Any]:
    """Return the schema. Raises RequestError for text that is no schema, or beyond a bound."""
    SCHEMA_LIMITS.check(_check_bytes("json_schema", text), "json_schema")
    try:
        schema = json.loads(text)
    except ValueError as exc:
        raise RequestError(f"json_schema: not JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema must be an object, got {text[:40]!r}")
    _check_counts(schema)
    return schema


def _check_bytes(kind: str, text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError(f"{kind}: character {exc.start} is half of a surrogate pair, not text") from exc
    if len(encoded) > MAX_BYTES:
        raise RequestError(f"{kind}: {len(encoded)} bytes, at most {MAX_BYTES} are compiled; ask for less at once")
    return encoded


def _check_counts(schema: dict[str, Any]) -> None:
    num_properties = num_refs = 0
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            num_refs += "$ref" in node
            num_properties += sum(len(node[key]) for key in _NAMED if isinstance(node.get(key), dict))
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    for count, limit, name in ((num_properties, MAX_PROPERTIES, "properties"), (num_refs, MAX_REFS, "$ref")):
        if count > limit:
            raise RequestError(f"json_schema: {count} {name}, at most {limit} are compiled; ask for less at once")
