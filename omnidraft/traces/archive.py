"""Archives of trace records: Avro object containers (deflate), readable by any Avro tool.

A file contains its schema, so it needs no headers.
"""

import zlib
from collections.abc import Iterable, Iterator
from io import SEEK_CUR, BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import fastavro

from omnidraft.errors import RequestError, UnknownSchema, WireError, cannot_write
from omnidraft.files import replaced_file
from omnidraft.private_files import PRIVATE
from omnidraft.traces.codec import AVRO_ERRORS, from_row, parsed_schema, to_row
from omnidraft.traces.record import TraceRecord
from omnidraft.traces.schema import SCHEMA_NAME

_SYNC_MARKER = b"omnidraft.trace."
"""It is fixed, so that the same records always give the same file."""
MAX_BLOCK_BYTES = 32 << 20
"""The size of an unpacked block; those written here have a record or two. A few kilobytes can unpack to gigabytes."""


def write(path: Path, records: Iterable[TraceRecord]) -> None:
    """Write all records, in order; the file appears whole or not at all, also after a power failure.

    Raises:
        RequestError: the file cannot be written.
        WireError: a record breaks a rule of checks.py.
    """
    metadata = {"omnidraft.schema": SCHEMA_NAME}
    try:
        with replaced_file(path, PRIVATE) as file:
            rows = (to_row(record) for record in records)
            schema = parsed_schema()
            fastavro.writer(file, schema, rows, codec="deflate", metadata=metadata, sync_marker=_SYNC_MARKER)
    except OSError as exc:
        raise cannot_write(path, exc) from exc


def read(path: Path) -> Iterator[TraceRecord]:
    """Yield the records of a file, in order.

    Raises:
        RequestError: the file cannot be read.
        UnknownSchema: the file holds something else.
        WireError: the file is broken, or a record breaks a rule of checks.py.
    """
    try:
        with path.open("rb") as file:
            header = fastavro.reader(file)
            if header.metadata.get("omnidraft.schema") != SCHEMA_NAME:
                raise UnknownSchema(f"{path} holds no {SCHEMA_NAME} records")
            schema = fastavro.parse_schema(header.writer_schema)
            for num_rows, block in _blocks(file, header.codec):
                for _ in range(num_rows):
                    yield from_row(fastavro.schemaless_reader(block, schema, parsed_schema()))
    except WireError:
        raise
    except OSError as exc:
        raise RequestError(f"cannot read trace records: {exc}") from exc
    except (*AVRO_ERRORS, zlib.error) as exc:
        raise WireError(f"{path} is not a whole trace archive: {type(exc).__name__}: {exc}") from exc


def _blocks(file: BufferedReader, codec: str) -> Iterator[tuple[int, BytesIO]]:
    """Yield the number of rows of each block and its bytes, from the end of the header on. Raises ValueError for one
    that unpacks to more than MAX_BLOCK_BYTES, or whose end is not where it says."""
    file.seek(-len(_SYNC_MARKER), SEEK_CUR)
    marker = file.read(len(_SYNC_MARKER))
    while file.peek(1):
        num_rows: Any = fastavro.schemaless_reader(file, "long", None)
        packed: Any = fastavro.schemaless_reader(file, "bytes", None)
        block = packed if codec == "null" else zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, MAX_BLOCK_BYTES)
        if len(block) >= MAX_BLOCK_BYTES:
            raise ValueError(f"a block of {len(packed):,} bytes unpacks to {MAX_BLOCK_BYTES:,} or more")
        if file.read(len(marker)) != marker:
            raise ValueError("a block does not end where it says")
        yield num_rows, BytesIO(block)
