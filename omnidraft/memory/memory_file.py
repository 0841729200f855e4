"""The file of one memory: the suffix index of an owner's texts, and what a learner needs to go on with them.

N ids, one separator an answer included; T segments, in the order of the ids, the segments of an answer together.
The texts themselves are stored once, as the index's ids. Equal texts give equal bytes.
"""

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np

from omnidraft.config import GROUP_KEYS
from omnidraft.errors import SnapshotCorrupt
from omnidraft.memory.recent_texts import MemoryText, joined
from omnidraft.memory.suffix_index import SuffixIndex


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A tenant, or a group of tenants, whose texts are drafted for each of them. The kind keeps a tenant that calls
    itself like a group apart from it."""

    kind: Literal["group", "tenant"]
    name: str

    @property
    def key_name(self) -> str:
        """The name under which the key store keeps the keys of this memory; a tenant's are those of its records."""
        return self.name if self.kind == "tenant" else GROUP_KEYS + self.name


class Owners:
    """Finds the owner of a tenant's texts."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        """Let the tenants of `groups`, which says tenant -> group, share the memory of their group."""
        self._groups = dict(groups)

    def of(self, tenant: str) -> Owner:
        """Return the owner of this tenant's texts."""
        group = self._groups.get(tenant)
        return Owner("tenant", tenant) if group is None else Owner("group", group)


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


VERSION = 1
_NEVER_MS = 2**63 - 1
_COLUMNS = {
    "lengths": np.uint32,
    "ends": np.uint8,  # 1: the answer ends with this segment
    "arrivals": np.uint32,  # the place of the segment in the order in which the texts came
    "requests": np.int64,
    "segments": np.uint32,
    "times_ms": np.int64,
    "contexts": np.uint32,
    "tenants": np.uint32,  # index into the names of the tenants
}


def encode(owner: Owner, texts: Sequence[MemoryText]) -> bytes:
    """Return the file of these texts, oldest first."""
    answers = joined(texts)
    index = SuffixIndex.build([np.concatenate([text.ids for text in answer]) for answer in answers])
    names = sorted({text.tenant for text in texts})
    facts = {"version": VERSION, "kind": owner.kind, "owner": owner.name, "tenants": names}
    return write_columns(index.to_arrays() | _text_columns(texts, answers, names), facts)


def _text_columns(
    texts: Sequence[MemoryText], answers: Sequence[Sequence[MemoryText]], names: Sequence[str]
) -> dict[str, np.ndarray]:
    arrival = {id(text): place for place, text in enumerate(texts)}
    number = {name: place for place, name in enumerate(names)}
    rows = [
        (
            len(text.ids),
            text is answer[-1],
            arrival[id(text)],
            text.request,
            text.segment,
            text.time_ms,
            text.num_context,
            number[text.tenant],
        )
        for answer in answers
        for text in answer
    ]
    values = zip(*rows, strict=True)
    return {name: np.array(each, dtype) for (name, dtype), each in zip(_COLUMNS.items(), values, strict=True)}


class MemoryFile:
    """The content of one file, whose large columns are views of it. Any number of threads may read it."""

    def __init__(self, buffer: Buffer) -> None:
        """Raises SnapshotCorrupt when it is not the file of a memory."""
        columns, facts = read_columns(buffer)
        self.owner, self._names = _parse_facts(facts)
        self.index = SuffixIndex.from_arrays(columns)
        self._ids, self._texts = columns["ids"], {name: columns.get(name, np.zeros(0)) for name in _COLUMNS}
        _check_texts(self._texts, num_ids=len(self._ids), num_tenants=len(self._names))
        self.oldest_ms = self._oldest_ms()
        """Tenant -> when its oldest text in here was said, Unix milliseconds."""

    @property
    def num_tokens(self) -> int:
        """The number of the texts' tokens."""
        return int(self._texts["lengths"].sum())

    def texts(self) -> list[MemoryText]:
        """Return copies of the texts, oldest first."""
        columns = {name: column.tolist() for name, column in self._texts.items()}
        lengths, ends = columns["lengths"], columns["ends"]
        ids, begin, texts = self._ids.copy(), 0, {}
        for row, length in enumerate(lengths):
            texts[columns["arrivals"][row]] = MemoryText(
                self._names[columns["tenants"][row]],
                columns["requests"][row],
                columns["segments"][row],
                columns["times_ms"][row],
                columns["contexts"][row],
                ids[begin : begin + length],
            )
            begin += length + ends[row]  # a separator stands behind an answer
        return [texts[place] for place in sorted(texts)]

    def _oldest_ms(self) -> dict[str, int]:
        times_ms, tenants = self._texts["times_ms"], self._texts["tenants"]
        return {
            name: int(times_ms[tenants == number].min(initial=_NEVER_MS)) for number, name in enumerate(self._names)
        }


def map_file(file: IO[bytes]) -> MemoryFile:
    """Return the memory in an open file, mapped: the file may be closed and deleted. Raises SnapshotCorrupt."""
    try:
        return MemoryFile(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except ValueError as exc:
        raise SnapshotCorrupt("the file of a memory is empty") from exc


def _parse_facts(facts: Mapping[str, object]) -> tuple[Owner, list[str]]:
    """Raises SnapshotCorrupt."""
    match facts:
        case {"version": 1, "kind": "tenant" | "group" as kind, "owner": str(name), "tenants": [*names]}:
            if all(isinstance(each, str) for each in names):
                return Owner(kind, name), [str(each) for each in names]
    raise SnapshotCorrupt(f"not the file of a memory of version {VERSION}: {str(facts)[:80]}")


def _check_texts(columns: Mapping[str, np.ndarray], *, num_ids: int, num_tenants: int) -> None:
    """Raise SnapshotCorrupt unless the columns describe so many ids."""
    num_texts = len(columns["lengths"])
    for name, dtype in _COLUMNS.items():
        if columns[name].dtype != dtype or len(columns[name]) != num_texts:
            raise SnapshotCorrupt(f"the memory's column {name} is not one of {num_texts} {np.dtype(dtype)}")
    num_described = int(columns["lengths"].sum(dtype=np.int64)) + int(columns["ends"].sum(dtype=np.int64))
    if num_described != num_ids or (num_texts and int(columns["tenants"].max()) >= num_tenants):
        raise SnapshotCorrupt(f"the memory's columns describe {num_described} ids, the index has {num_ids}")
