"""A slice of a trace topic, or of an archive, for experiments to learn from. Live offsets do not move.

Unreadable records are counted; only the distiller dead-letters them.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from omnidraft import assembly, config
from omnidraft.assembly.drafting import drafter_prompt
from omnidraft.distill.ingest import topic_scan
from omnidraft.errors import RequestError, WireError
from omnidraft.ports import LogReader
from omnidraft.traces import archive, codec
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.retokenise import retokenise

FILTERS = ("target", "drafter", "tenant", "worker", "mode", "snapshot_version", "request_id")
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
_ANY_LENGTH = 2**31
"""A drafter or learner cuts a prompt to its context itself."""
Position = tuple[int, int]
"""The partition and offset of a record."""


@dataclass(frozen=True, slots=True)
class SliceFilter:
    """Selects records of a log."""

    from_ms: int | None = None
    to_ms: int | None = None
    """Unix milliseconds; records that ended before it."""
    equal: Mapping[str, str] = field(default_factory=dict)
    """Field -> its required value, as text."""

    def skip_reason(self, record: TraceRecord) -> str | None:
        """Return the reason why the record is skipped; None when it is selected."""
        if self.from_ms is not None and record.time_ms < self.from_ms:
            return "too_early"
        if self.to_ms is not None and record.time_ms >= self.to_ms:
            return "too_late"
        differing = [name for name, value in self.equal.items() if str(getattr(record, name)) != value]
        return f"other_{differing[0]}" if differing else None


@dataclass(slots=True)
class Slice:
    """The selected records, in the order of partitions and offsets."""

    records: list[TraceRecord] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    """That of each record in the log, or (0, its number) in the archive."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of skipped records by reason."""
    log_id: str | None = None
    """The identity of the log; None for an archive."""

    def require(self) -> list[TraceRecord]:
        """Return the records. Raises RequestError when there are none."""
        if not self.records:
            passed_over = f"; passed over: {in_words(self.skipped)}" if self.skipped else ""
            raise RequestError(f"the slice has no records{passed_over}")
        return self.records


def in_words(counts: Mapping[str, int]) -> str:
    """Return numbers of records or answers by reason as a message says them."""
    return ", ".join(f"{num} {reason.replace('_', ' ')}" for reason, num in counts.items())


def parse_filter(from_time: str | None, to_time: str | None, filters: Iterable[str]) -> SliceFilter:
    """Parse command-line options: 90m, 24h or 7d ago, ISO times or Unix milliseconds; `name=value` with commas between.

    Raises:
        RequestError: not a time, an unknown field, or no `=`.
    """
    pairs = [each.strip().partition("=") for text in filters for each in text.split(",") if each.strip()]
    for name, sign, _ in pairs:
        if name not in FILTERS or not sign:
            raise RequestError(f"--filter takes name=value, names: {', '.join(FILTERS)}; got {name}{sign}")
    return SliceFilter(_time_ms(from_time), _time_ms(to_time), {name: value for name, _, value in pairs})


def of_pair(
    archive_path: Path | None, settings: config.Settings, tokenizers: assembly.Vocabularies, slice_filter: SliceFilter
) -> Slice:
    """Read the selected records of the settings' target and drafter, unless the filter names others. The answers in an
    archive are anybody's to draft for: those that another drafter's worker recorded become this one's. Raises as
    `read`."""
    is_live, models, alignment = archive_path is None, settings.models, tokenizers.alignment.fingerprint
    pair = {"target": models.target} | ({"drafter": models.drafter} if is_live else {})
    equal = pair | dict(slice_filter.equal) | ({"alignment": alignment} if is_live else {})
    found = read(archive_path, settings, replace(slice_filter, equal=equal))
    for number, record in enumerate(found.records):
        if record.alignment != alignment:
            found.records[number] = _adopted(record, models.drafter, tokenizers)
    return found


def _adopted(record: TraceRecord, drafter: str, tokenizers: assembly.Vocabularies) -> TraceRecord:
    """Return the record as this drafter's worker would have made it, without what the other one drafted."""
    ids, rest = drafter_prompt(record.prompt_ids.tolist(), tokenizers, _ANY_LENGTH)
    tail = retokenise(rest, tokenizers.target.vocabulary, tokenizers.drafter, tokenizers.alignment)
    return replace(
        record,
        drafter=drafter,
        alignment=tokenizers.alignment.fingerprint,
        snapshot_version=None,
        drafter_prompt_ids=np.array([*ids, *tail], np.uint32),
        rounds=codec.no_rounds(),
        noise_weight=None,
    )


def read(archive_path: Path | None, settings: config.Settings, slice_filter: SliceFilter) -> Slice:
    """Read the selected records of an archive, or without one of the settings' log, which is not created.

    Raises:
        BusError, WireError, RequestError: the log or archive cannot be read.
    """
    result = Slice()
    selected: list[tuple[Position, TraceRecord]] = []
    found: Iterable[tuple[Position, TraceRecord]]
    if archive_path is None:
        found = _log_records(assembly.existing_log_reader(settings, settings.log.traces_topic), result)
    else:
        found = (((0, number), record) for number, record in enumerate(archive.read(archive_path)))
    for position, record in found:
        reason = slice_filter.skip_reason(record)
        if reason is None:
            selected.append((position, record))
        else:
            result.skipped[reason] += 1
    selected.sort(key=lambda each: each[0])
    result.positions = [position for position, _ in selected]
    result.records = [record for _, record in selected]
    return result


def _log_records(reader: LogReader, result: Slice) -> Iterator[tuple[Position, TraceRecord]]:
    """Yield the records up to the present end of the log; the result has its identity, and how many are unreadable."""
    try:
        result.log_id = reader.identity()
        for message in topic_scan.messages(reader):
            try:
                yield (message.partition, message.offset), codec.decode(message.value, message.headers)
            except WireError:
                result.skipped["unreadable"] += 1
    finally:
        reader.close()


def _time_ms(text: str | None) -> int | None:
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    if text and text[-1] in _UNITS_S and text[:-1].isdecimal():
        return int((time.time() - int(text[:-1]) * _UNITS_S[text[-1]]) * 1000)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError as exc:
        raise RequestError(f"not a time: {text!r}; write 24h, 2026-11-22T10:00 or Unix milliseconds") from exc
    return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)
