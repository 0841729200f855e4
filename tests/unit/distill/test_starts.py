"""From the same snapshot, at the same offsets, without the same tenants: the same bits, whatever else is in the log."""

from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.distill.forgetting import RecordRetention
from omnidraft.distill.ingest import batcher
from omnidraft.distill.ingest.ingest import Ingest
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.ports import Outgoing
from omnidraft.snapshots.manifest import Manifest
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryWriter
from omnidraft.traces import codec
from tests.distiller_runs import Setting, SlowReader, names, run_until_idle
from tests.trace_records import make_record

DAY_MS = 86_400_000
ROOM = 4
"""Records of a partition that are buffered before others are passed over."""
OPTIONS = {"held_out_every": 4, "limits": {"records_per_step": 3, "tenant_share": 0.5}}
SAME = ("num_records", "num_steps", "num_tokens", "losses", "held_out_records", "agreement_before", "agreement_after")


def run(setting: Setting, most: int, **options) -> None:
    """With polls of so many messages."""
    run_until_idle(setting.distiller(reader=SlowReader(setting.log, "t", most), **OPTIONS, **options)[0], 60)


def content(manifest: Manifest) -> dict[str, object]:
    return dict(manifest.sha256) | {name: getattr(manifest, name) for name in SAME}


@pytest.mark.parametrize(
    "learner",
    [
        {"replay_records": 2},
        {"train": "lora", "replay_records": 2, "head": True},
        {"train": "lora", "factor_tenants": 2},
    ],
    ids=["full", "lora, head", "lora, factors"],
)
def test_learning_again_without_a_tenant_is_bit_for_bit_the_run_that_never_saw_them(
    pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner
) -> None:
    """The tenant sends long stretches, as far ahead as buffers reach, and is the last to be heard of."""
    monkeypatch.setattr(batcher, "LOOKAHEAD", ROOM)
    both, alone = (Setting(pair, tmp_path / name, partitions=3, **learner) for name in ("both", "alone"))
    retention = partial(RecordRetention, DAY_MS / 1000 / 2)
    for setting in (both, alone):
        setting.emit(*names(8), tenant="stayer", time_ms=DAY_MS)
        run(setting, 3, retention=retention())
    first = both.registry.resolve("latest").version
    both.registry.promote(first)  # so it keeps its optimizer
    assert content(both.manifest()) == content(alone.manifest())
    for number in range(3):
        both.emit(*names(14, 500 + 20 * number), tenant="leaver", time_ms=(2 + number) * DAY_MS)
        for setting in (both, alone):
            for name in names(6, 100 + 10 * number):
                setting.emit(name, tenant=f"stayer-{int(name[-1]) % 3}", time_ms=(1 + number) * DAY_MS // 2)
    run(both, 3, retention=retention())
    run(alone, 5, retention=retention())
    saw_both, never_saw = both.manifest(), alone.manifest()
    assert saw_both.num_records > never_saw.num_records
    partitions = enumerate(both.log.topic("t"))
    firsts = {number: [each.offset for each in messages if b"leaver" in each.value] for number, messages in partitions}
    first_offsets = {number: offsets[0] for number, offsets in firsts.items() if offsets}
    both.forget("leaver", until_ms=9 * DAY_MS, first_offsets=first_offsets)
    run(both, 2, control=both.control(), retention=retention())
    again = both.manifest()
    assert content(again) == content(never_saw)
    assert len(never_saw.sha256) >= 6
    assert again.counts["forgotten"] == 42
    assert sum(again.offsets.values()) == sum(never_saw.offsets.values()) + 42
    assert again.forgets == ("order",)


def batches(log: MemoryLog, most: int, without: str) -> list[list[str]]:
    """Read the log with polls of at most so many messages."""
    reader, metrics = SlowReader(log, "t", most), CountingMetrics()
    consumer = TraceConsumer(
        reader,
        MemoryWriter(log, "dead"),
        None,
        metrics,
        topic="t",
        is_forgotten=lambda record: record.tenant == without,
    )
    ingest = Ingest(consumer, batcher.Batcher(reader.partitions(), records_per_step=3, held_out_every=0), metrics)
    ingest.seek()
    made, num_idle = [], 0
    while num_idle < 3:
        batch = ingest.next_batch(lambda poll: poll())
        made += [[record.request_id for record in batch.records]] if batch else []
        is_at_end = ingest.batcher.read_to == {n: end for n, end in reader.end_offsets().items() if end}
        num_idle = num_idle + 1 if batch is None and is_at_end else 0
    return made


@given(
    stretches=st.lists(st.tuples(st.sampled_from(["stayer", "leaver"]), st.integers(1, 16)), max_size=8),
    polls=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)
@settings(max_examples=25, deadline=None)
def test_what_is_learned_together_depends_on_the_log_alone(stretches, polls) -> None:
    """However long another tenant's stretches are in one partition while the others have records waiting."""
    both, alone = MemoryLog(3), MemoryLog(3)
    numbers = count()
    for number, (tenant, num) in enumerate(stretches):
        for _ in range(num):
            record = make_record(f"r{next(numbers)}", tenant=tenant)
            at = number % 3 if tenant == "leaver" else None
            message = Outgoing(codec.key(record), codec.encode(record), codec.headers(record), partition=at)
            for log in (both, alone) if tenant == "stayer" else (both,):
                MemoryWriter(log, "t").append([message])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "LOOKAHEAD", ROOM)
        patch.setattr(batcher, "MOST_AHEAD", 100)
        assert batches(both, polls[0], "leaver") == batches(alone, polls[1], "leaver")
