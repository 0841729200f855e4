"""Trace records in a snapshot's tensors, encoded as they are in the log."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

_SCHEMA_HEADERS = ("schema", "schema_version")


def to_tensors(prefix: str, records: Iterable[TraceRecord]) -> dict[str, Tensor]:
    """Return tensors by name, in order; those of records begin with `prefix`."""
    tensors: dict[str, Tensor] = {}
    for index, record in enumerate(records):
        headers = codec.headers(record)
        tensors |= {name: _of_bytes(headers[name]) for name in _SCHEMA_HEADERS}  # the same for all
        tensors[f"{prefix}{index:06d}"] = _of_bytes(codec.encode(record))
    return tensors


def from_tensors(prefix: str, tensors: Mapping[str, Tensor]) -> list[TraceRecord]:
    """Return the records in the order in which `to_tensors` got them. Raises WireError when one cannot be read."""
    headers = {name: _to_bytes(tensors[name]) for name in _SCHEMA_HEADERS if name in tensors}
    names = sorted(name for name in tensors if name.startswith(prefix))
    return [codec.decode(_to_bytes(tensors[name]), headers) for name in names]


def _of_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
