"""Checks size and depth of a JSON text from its bytes in a few milliseconds, before anything parses it.

Parsers recurse and hold Python's interpreter lock: a text of brackets overflows stacks, and a megabyte of tiny values
blocks every thread for 60 ms.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.errors import RequestError

_OPEN, _CLOSE = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPEN + _CLOSE))
_SIGN = np.zeros(256, np.int8)
_SIGN[list(_OPEN)], _SIGN[list(_CLOSE)] = 1, -1


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
