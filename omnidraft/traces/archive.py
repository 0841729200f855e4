"""Archives of trace records: Avro object containers (deflate), readable by any Avro tool.

A file contains its schema, so it needs no headers.
"""

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import fastavro

from omnidraft.errors import RequestError, UnknownSchema, WireError, cannot_write
from omnidraft.files import replaced_file
from omnidraft.private_files import PRIVATE
from omnidraft.traces.codec import from_row, parsed_schema, to_row
from omnidraft.traces.record import TraceRecord
from omnidraft.traces.schema import SCHEMA_NAME

_SYNC_MARKER = b"omnidraft.trace."
"""It is fixed, so that the same records always give the same file."""


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


def is_archive(path: Path) -> bool:
    """Return whether a file begins as an Avro container does, whatever its name is."""
    return path.is_file() and bool(fastavro.is_avro(str(path)))


def read(path: Path) -> Iterator[TraceRecord]:
    """Yield the records of a file, in order.

    Raises:
        RequestError: the file cannot be read.
        UnknownSchema: the file holds something else.
        WireError: the file is broken, or a record breaks a rule of checks.py.
    """
    try:
        with path.open("rb") as file:
            reader = fastavro.reader(file, parsed_schema())
            if reader.metadata.get("omnidraft.schema") != SCHEMA_NAME:
                raise UnknownSchema(f"{path} holds no {SCHEMA_NAME} records")
            for row in reader:
                yield from_row(row)
    except WireError:
        raise
    except OSError as exc:
        raise RequestError(f"cannot read trace records: {exc}") from exc
    except (EOFError, IndexError, KeyError, TypeError, ValueError, OverflowError, zlib.error) as exc:
        raise WireError(f"{path} is not a whole trace archive: {type(exc).__name__}: {exc}") from exc
