"""The manifest of a snapshot.

Folder layout (bundle.py reads and writes it):
    manifest.json
    serving/drafter.safetensors     absent in the first snapshot: the base drafter as it is; may hold an acceptance head
    serving/ngrams.safetensors      the n-gram cache, packed arrays
    resume/...                      master weights, optimizer, random state: only the distiller reads them
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class SampledRange(BaseModel):
    """A range of the log of which a learner that lagged learns a share of the requests, chosen by a hash of the
    request id (distill/ingest/catch_up.py)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    start: dict[int, int]
    """Partition -> first offset; partitions that are not named start at their first message."""
    end: dict[int, int]
    """Partition -> one past the last offset."""
    share: float | None = None
    """The share of the requests that is learned. None: a snapshot of an earlier version, which learned the `num_kept`
    newest records of the range; that cannot be checked again."""
    num_kept: int | None = None

    def holds(self, partition: int, offset: int) -> bool:
        """Return whether this offset lies in the range."""
        return self.start.get(partition, 0) <= offset < self.end.get(partition, 0)

    def reaches_beyond(self, offsets: Mapping[int, int]) -> bool:
        """Return whether a part of the range lies at or behind these next offsets."""
        return any(offsets.get(partition, 0) < end for partition, end in self.end.items())


class Manifest(BaseModel):
    """The metadata of a snapshot. It is written last: a folder without it is not a snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    snapshot_id: str
    parent_id: str | None = None
    """None for the first snapshot of a pair."""
    target: str
    drafter: str
    drafter_hash: str
    """Hash of the base drafter's weights; the snapshot fits no other base."""
    alignment: str
    """Fingerprint of the vocabulary pair; see vocab/alignment.py."""
    train: str = "base"
    """base, full or lora: the content of serving/drafter.safetensors."""
    settings: dict[str, str] = {}
    """Training settings: loss, learning rate, batch; they are parameters in the registry."""
    offsets: dict[int, int] = {}
    """Partition -> next offset of the trace topic: every record before it is learned or counted in `counts`."""
    num_records: int = 0
    """Records learned since the base drafter."""
    num_tokens: int = 0
    num_steps: int = 0
    losses: dict[str, float] = {}
    """Means over the steps since the parent."""
    held_out_records: int = 0
    agreement_before: float | None = None
    """Held-out agreement of the parent, on the same records as agreement_after."""
    agreement_after: float | None = None
    agreement_change_error: float | None = None
    """Standard error of agreement_after - agreement_before, which were measured on the same records."""
    speedup_before: float | None = None
    """Predicted speedup of the parent over plain decoding, from its hits on the same records and the times in them."""
    speedup_after: float | None = None
    """The same prediction for this snapshot."""
    log_id: str | None = None
    """Identity of the log of the offsets; None: the snapshot is older than this field, or nothing was read."""
    restarts: tuple[str, ...] = ()
    """Names of the executed `learning restart` orders. If there is one more than in the parent, learning restarted at
    these offsets."""
    counts: dict[str, int] = {}
    """Records skipped, by reason, since the base drafter."""
    lag_samples: tuple[SampledRange, ...] = ()
    """The ranges that reach beyond the parent's offsets; they hold for this snapshot's records and for what comes."""
    traceparent: str | None = None
    """W3C trace context of the publication; None: the distiller was not traced."""
    code_version: str = ""
    created_ms: int = 0
    sha256: dict[str, str] = {}
    """Relative path -> checksum of every other file."""
    signature: str | None = None
    """Signature of all other fields, see signature.py; None: published without registry.signing_key."""
