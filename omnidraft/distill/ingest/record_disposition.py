"""The disposition of a readable record of our pair: learned, held out, or dropped as a duplicate.

The batcher decides while learning; the audit decides again, from the log.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Container
from enum import StrEnum

from omnidraft.traces.record import TraceRecord

SEEN_RECORDS = 65_536
"""A record is a duplicate when it is among this many before it. A producer that was cut off before an acknowledgement
repeats its batch once the log answers again, behind all that the others wrote meanwhile; a key is 8 bytes of a
snapshot."""


ANYBODY = 0
"""Stands for all tenants among the hashes of those who sent records: it may have been anybody."""


class Disposition(StrEnum):
    """The disposition of a record that is not passed over. The values are keys of a manifest's counts."""

    LEARNED = "learned"
    HELD_OUT = "held_out"
    DUPLICATE = "duplicate"


def record_key(record: TraceRecord) -> int:
    """Return the key of a record: the same for every copy of it, in every process."""
    return hash_63(f"{record.request_id}\n{record.segment}")


def is_held_out(record: TraceRecord, held_out_every: int) -> bool:
    """Return whether the record is held out: the answers to one prompt in `held_out_every`, by a hash of its ids, so
    that no answer to a question that many ask is learned while another one judges; 0 holds none out."""
    return held_out_every > 0 and hash_of_prompt(record) % held_out_every == 0


def hash_of_prompt(record: TraceRecord) -> int:
    """Return a hash of 64 bits of the ids of the record's prompt, the same in every process."""
    return hash_64(record.prompt_ids.astype("<u4").tobytes())


def disposition(key: int, held_out: bool, *seen: Container[int]) -> Disposition:
    """Return the disposition of a record with this key, after the keys already seen."""
    if any(key in keys for keys in seen):
        return Disposition.DUPLICATE
    return Disposition.HELD_OUT if held_out else Disposition.LEARNED


def forget_oldest(seen: OrderedDict[int, None], num_kept: int) -> None:
    """Keep the newest keys."""
    while len(seen) > num_kept:
        seen.popitem(last=False)


def hash_64(content: str | bytes) -> int:
    """Return a hash of 64 bits, the same in every process."""
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def hash_63(text: str) -> int:
    """Return a hash of 63 bits, which a tensor of int64 holds."""
    return hash_64(text) >> 1
