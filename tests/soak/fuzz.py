"""Hostile messages through the learner's consumer: each is learned from, skipped or dead-lettered, once.

They come in batches, each through a consumer and a SQLite log of its own, which is deleted afterwards, so that disk
and memory stay bounded. Sound messages are recorded traffic.
"""

import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.demo.recorded import RECORDED
from omnidraft.distill.ingest import dead_letters, topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import ContractError
from omnidraft.ports import OTHER_PAIR, Offsets, Outgoing
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive, codec
from tests.soak import hostile_messages
from tests.soak.part import PartResult, SoakPlan

NUM_SOUND = 16
BATCH_MESSAGES = 5_000
PARTITIONS = 3
MAX_GROWTH = 1.1
"""The growth of peak memory that is allowed from the first tenth of the batches to the last, as a ratio."""


def run(plan: SoakPlan) -> PartResult:
    """Count all messages by disposition. Raises ContractError when a message has none, or two."""
    dispositions, started, peaks = Counter[str](), time.perf_counter(), list[float]()
    starts = range(0, plan.fuzzed, BATCH_MESSAGES)
    with (
        bar("messages", plan.fuzzed) as advance,
        ProcessPoolExecutor(plan.threads, get_context("spawn")) as pool,
    ):
        sizes = [(min(BATCH_MESSAGES, plan.fuzzed - start), plan.seed + start) for start in starts]
        running = [pool.submit(_batch, *each) for each in sizes]
        try:
            for ended in as_completed(running):
                counts, peak_mib = ended.result()
                dispositions += counts
                peaks.append(round(peak_mib, 1))
                advance(sum(counts.values()))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the batches under way only
    seconds, tenth = time.perf_counter() - started, max(1, len(peaks) // 10)
    growth = median(peaks[-tenth:]) / median(peaks[:tenth])
    figures = {
        "messages": plan.fuzzed,
        "fates": dict(sorted(dispositions.items())),
        "seconds": round(seconds, 2),
        "per_s": round(plan.fuzzed / seconds),
        "peak_rss_mib": max(peaks),
        "peak_rss_mib_after_first_batch": peaks[0],
        "peaks_rss_mib": peaks,
        "growth": round(growth, 3),
        "seed": plan.seed,
    }
    once = f"all {plan.fuzzed:,} hostile records are learned, passed over or dead-lettered, each once"
    flat = f"memory stays within {MAX_GROWTH:.0%} of where it was at first"
    return PartResult(figures, {once: dispositions.total() == plan.fuzzed, flat: growth <= MAX_GROWTH})


def _batch(size: int, seed: int) -> tuple[Counter[str], float]:
    """Return the dispositions of a batch, and this process's peak memory so far in MiB."""
    dispositions = batch_dispositions(list(hostile_messages.messages(_sound(), size, seed=seed)))
    return dispositions, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def batch_dispositions(messages: Sequence[Outgoing]) -> Counter[str]:
    """Count the messages by disposition. Raises ContractError when a message has none, or two."""
    with tempfile.TemporaryDirectory(prefix="omnidraft-fuzz-") as folder:
        path = Path(folder, "log.db")
        writer = SqliteWriter(path, "traces", partitions=PARTITIONS)
        writer.append(messages)
        reader, dead_letter_writer = SqliteReader(path, "traces"), SqliteWriter(path, "dead")
        ours, ends = next(archive.read(RECORDED)), reader.end_offsets()
        consumer = TraceConsumer(
            reader,
            dead_letter_writer,
            ours.alignment,
            CountingMetrics(),
            topic="traces",
            target=ours.target,
            drafter=ours.drafter,
        )
        dispositions, offsets = Counter[str](), Counter[tuple[int, int]]()
        for polled in topic_scan.polls_until(lambda: consumer.poll(topic_scan.POLL_MESSAGES, 0), ends, idle_s=0):
            offsets.update((partition, offset) for partition, offset, _ in polled.records)
            others = [each[:2] for each in polled.skipped if each[2] == OTHER_PAIR]
            offsets.update(others)
            dispositions.update({"returned": len(polled.records), OTHER_PAIR: len(others)})
        for dead_letter in dead_letters.read(SqliteReader(path, "dead"), idle_s=0):
            dispositions[dead_letter.reason] += 1
            offsets.update([dead_letter.origin] if dead_letter.origin else [])
        _require_one_disposition_each(offsets, ends)
        return dispositions


def _require_one_disposition_each(offsets: Counter[tuple[int, int]], ends: Offsets) -> None:
    expected = {(partition, offset) for partition, end in ends.items() for offset in range(end)}
    if wrong := [each for each in expected | set(offsets) if offsets[each] != 1]:
        raise ContractError(f"{len(wrong)} messages have no disposition or several, the first is {min(wrong)}")


def _sound() -> list[Outgoing]:
    """Return the smallest recorded messages."""
    recorded = [Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in archive.read(RECORDED)]
    return sorted(recorded, key=lambda message: len(message.value))[:NUM_SOUND]
