"""The pinned held-out records: a file of the operator's, which no writer of the trace log can change."""

import hashlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from omnidraft.errors import ConfigError, RequestError, WireError
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord

MOST_RECORDS = 256
"""Each is measured for every snapshot and takes about 25 kB of memory."""


@dataclass(frozen=True, slots=True)
class PinnedRecords:
    """The records of one file."""

    sha256: str
    records: tuple[TraceRecord, ...]


def read_pinned(path: Path, alignment: str) -> PinnedRecords:
    """Read a trace archive, as `omnidraft traces export` writes it.

    Raises:
        ConfigError: there is none, it is broken, too large or empty, or a record is of another vocabulary pair.
    """
    try:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        records = tuple(islice(archive.read(path), MOST_RECORDS + 1))
    except (OSError, RequestError, WireError) as exc:
        raise ConfigError(f"learner.pinned_held_out: {path} cannot be read: {exc}") from exc
    if not 0 < len(records) <= MOST_RECORDS:
        number = "no record" if not records else f"more than {MOST_RECORDS} records"
        raise ConfigError(f"learner.pinned_held_out: {path} has {number}; export 1 to {MOST_RECORDS}")
    if strange := next((each.alignment for each in records if each.alignment != alignment), None):
        raise ConfigError(
            f"learner.pinned_held_out: {path} has a record of the vocabulary pair {strange}, this learner's is "
            f"{alignment}; export records of this target and drafter"
        )
    return PinnedRecords(sha256, records)
