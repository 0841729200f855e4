"""Limits of a client's JSON texts and grammars, checked before a parser or native code reads them.

Parsers recurse and hold Python's interpreter lock: a text of brackets overflows stacks, and a megabyte of tiny values
blocks every thread for 60 ms. Size and depth of a JSON text are read from its bytes, in a few milliseconds.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnidraft.errors import RequestError

_OPEN, _CLOSE = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPEN + _CLOSE))
_SIGN = np.zeros(256, np.int8)
_SIGN[list(_OPEN)], _SIGN[list(_CLOSE)] = 1, -1

MAX_BYTES = 65_536
"""The size of a grammar, at most."""
MAX_PROPERTIES = 1_000
"""Keys under `properties`, `patternProperties` and the like, and definitions, in the whole schema."""
MAX_REFS = 1_000
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Bounds of one JSON text."""

    num_values: int
    """Values of arrays and objects together, nested ones included."""
    depth: int
    """Arrays and objects inside each other."""

    def check(self, text: bytes, name: str) -> None:
        """Return for a JSON text within these bounds, and for any text that is no JSON.

        Raises:
            RequestError: it has more values, or is deeper; `name` says which text.
        """
        bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        is_large = bare.count(b'"') > 4 * self.num_values  # a key and a value have two each
        outside = b"" if is_large else b"".join(bare.split(b'"')[::2])
        if is_large or sum(outside.count(mark) for mark in (b",", b"[", b"{")) > self.num_values:
            raise RequestError(f"{name}: more than {self.num_values} values; send fewer at once")
        depths = np.cumsum(_SIGN[np.frombuffer(outside.translate(None, _NOT_BRACKETS), np.uint8)], dtype=np.int64)
        if depths.size and depths.max() > self.depth:
            raise RequestError(f"{name}: nested {depths.max()} deep, at most {self.depth} are read")


BODY_LIMITS = JsonLimits(num_values=20_000, depth=100)
"""Limits of a request's whole body."""
SCHEMA_LIMITS = JsonLimits(num_values=20_000, depth=64)


def checked_text(text: str, kind: str) -> str:
    """Return a grammar of this kind. Raises RequestError where it is too long, or contains half of a surrogate pair."""
    _check_bytes(kind, text)
    return text


def checked_schema(text: str, kind: str = "json_schema") -> dict[str, Any]:
    """Return the schema, or the object with all schemas of this kind of grammar. Raises RequestError for text that is
    none, or beyond a bound."""
    SCHEMA_LIMITS.check(_check_bytes(kind, text), kind)
    try:
        schema = json.loads(text)
    except ValueError as exc:
        raise RequestError(f"{kind}: not JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise RequestError(f"{kind} must be an object, got {text[:40]!r}")
    _check_counts(schema, kind)
    return schema


def _check_bytes(kind: str, text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError(f"{kind}: character {exc.start} is half of a surrogate pair, not text") from exc
    if len(encoded) > MAX_BYTES:
        raise RequestError(f"{kind}: {len(encoded)} bytes, at most {MAX_BYTES} are compiled; ask for less at once")
    return encoded


def _check_counts(schema: dict[str, Any], kind: str) -> None:
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
            raise RequestError(f"{kind}: {count} {name}, at most {limit} are compiled; ask for less at once")
