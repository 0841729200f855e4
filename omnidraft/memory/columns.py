"""Columns of numbers in one safetensors file, read from a memory map without a copy, which safetensors itself makes.

The format says where each column stands, keeps it aligned and holds no code: https://github.com/huggingface/safetensors.
Equal columns and facts give equal bytes.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from omnidraft.errors import SnapshotCorrupt

_FACTS, _METADATA = "facts", "__metadata__"
_TYPES = {"U8": "u1", "U32": "<u4", "I64": "<i8"}
_LENGTH_BYTES = 8

Buffer = bytes | memoryview


def write_columns(columns: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with these columns, and these facts as JSON."""
    from safetensors import numpy

    return numpy.save(
        {name: np.ascontiguousarray(column) for name, column in columns.items()},
        {_FACTS: json.dumps(facts, sort_keys=True)},
    )


def read_columns(buffer: Buffer) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the columns, which are views of the buffer, and the facts. Raises SnapshotCorrupt."""
    try:
        size = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
        header = json.loads(bytes(buffer[_LENGTH_BYTES : _LENGTH_BYTES + size]))
        facts = json.loads(header.pop(_METADATA)[_FACTS])
        data = memoryview(buffer)[_LENGTH_BYTES + size :]
        return {name: _column(data, **entry) for name, entry in header.items()}, dict(facts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise SnapshotCorrupt(f"not a file of columns: {exc}") from exc


def _column(data: memoryview, *, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    """Raises ValueError, TypeError, KeyError."""
    begin, end = data_offsets
    column = np.frombuffer(data[begin:end], _TYPES[dtype])
    if len(shape) != 1 or len(column) != math.prod(shape):
        raise ValueError(f"{len(column)} values of shape {shape}")
    return column
