"""Batches of hostile messages, each through a consumer and a SQLite log of its own.

The log is deleted afterwards, so that disk and memory stay bounded.

Their processes import this module, which the one that is run with `-m` cannot be.
"""

import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.demo.recorded import RECORDED
from omnidraft.distill.ingest import dead_letters, topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import ContractError
from omnidraft.ports import OTHER_PAIR, Offsets, Outgoing
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive, codec
from pipelines.fuzz import corpus

NUM_SOUND = 16
BATCH_MESSAGES = 5_000
PARTITIONS = 3


def run(num: int, *, seed: int, processes: int = 1) -> dict[str, Any]:
    """Return figures of `num` messages, in batches over processes. Raises ContractError as `batch_dispositions`."""
    dispositions, started, peaks_mib = Counter[str](), time.perf_counter(), list[float]()
    batches = [(start, min(BATCH_MESSAGES, num - start)) for start in range(0, num, BATCH_MESSAGES)]
    with bar("messages", num) as advance, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = [pool.submit(_batch, size, seed + start) for start, size in batches]
        try:
            for ended in as_completed(running):
                counts, peak_mib = ended.result()
                dispositions += counts
                peaks_mib.append(peak_mib)
                advance(sum(counts.values()))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the batches under way only
    return {
        "messages": num,
        "fates": dict(sorted(dispositions.items())),
        "seconds": round(time.perf_counter() - started, 2),
        "peak_rss_mib": round(max(peaks_mib), 1),
        "peak_rss_mib_after_first_batch": round(peaks_mib[0], 1),
        "peaks_rss_mib": [round(peak, 1) for peak in peaks_mib],
        "seed": seed,
    }


def _batch(size: int, seed: int) -> tuple[Counter[str], float]:
    """Return the dispositions of a batch, and this process's peak memory so far in MiB."""
    dispositions = batch_dispositions(list(corpus.messages(_sound(), size, seed=seed)))
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
