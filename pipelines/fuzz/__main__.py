"""Hostile messages through the real source: none may crash it, be lost, or be both returned and dead-lettered.

`python -m pipelines.fuzz --num N --json OUT`. Sound messages are recorded traffic. Every batch has a SQLite
log of its own, which is deleted afterwards, so that disk and memory stay bounded.
"""

import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.distill.ingest import dead_letters, topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import ContractError
from omnidraft.ports import Offsets, Outgoing
from omnidraft.ports.trace_reasons import OTHER_PAIR
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive, codec
from pipelines.fuzz import corpus
from pipelines.lib import report
from pipelines.lib.progress import bar

RECORDED = Path(__file__).parents[1] / "data" / "gsm8k_qwen1.5b.avro"
NUM_SOUND = 16
BATCH_MESSAGES = 5_000
PARTITIONS = 3


def main(
    num: Annotated[int, typer.Option(min=1, help="Messages.")] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Send them, and account for every one."""
    made = run(num, seed=seed)
    if json_path is not None:
        report.save(made, json_path)
    print(made)


def run(num: int, *, seed: int, processes: int = 1) -> dict[str, Any]:
    """Figures of so many messages, in batches over these processes. Raises ContractError as `batch_dispositions`."""
    fates, started, peaks_mib = Counter[str](), time.perf_counter(), list[float]()
    batches = [(start, min(BATCH_MESSAGES, num - start)) for start in range(0, num, BATCH_MESSAGES)]
    with bar("messages", num) as advance, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = [pool.submit(_batch, size, seed + start) for start, size in batches]
        try:
            for ended in as_completed(running):
                found, peak_mib = ended.result()
                fates += found
                peaks_mib.append(peak_mib)
                advance(sum(found.values()))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the batches under way only
    return {
        "messages": num,
        "fates": dict(sorted(fates.items())),
        "seconds": round(time.perf_counter() - started, 2),
        "peak_rss_mib": round(max(peaks_mib), 1),
        "peak_rss_mib_after_first_batch": round(peaks_mib[0], 1),
        "peaks_rss_mib": [round(peak, 1) for peak in peaks_mib],
        "seed": seed,
    }


def _batch(size: int, seed: int) -> tuple[Counter[str], float]:
    """Fates, and the most memory that this process has had so far, in MiB."""
    fates = batch_dispositions(list(corpus.messages(_sound(), size, seed=seed)))
    return fates, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def batch_dispositions(messages: Sequence[Outgoing]) -> Counter[str]:
    """What became of them. Raises ContractError when a message has no fate, or two."""
    with tempfile.TemporaryDirectory(prefix="omnidraft-fuzz-") as folder:
        path = Path(folder, "log.db")
        writer = SqliteWriter(path, "traces", partitions=PARTITIONS)
        writer.append(messages)
        reader, letters = SqliteReader(path, "traces"), SqliteWriter(path, "dead")
        ours, ends = next(archive.read(RECORDED)), reader.end_offsets()
        pair = {"target": ours.target, "drafter": ours.drafter}
        source = TraceConsumer(reader, letters, ours.alignment, CountingMetrics(), topic="traces", **pair)
        fates, places = Counter[str](), Counter[tuple[int, int]]()
        for polled in topic_scan.polls_until(lambda: source.poll(topic_scan.POLL_MESSAGES, 0), ends, idle_s=0):
            places.update((partition, offset) for partition, offset, _ in polled.records)
            others = [each[:2] for each in polled.skipped if each[2] == OTHER_PAIR]
            places.update(others)
            fates.update({"returned": len(polled.records), OTHER_PAIR: len(others)})
        for letter in dead_letters.read(SqliteReader(path, "dead"), idle_s=0):
            fates[letter.reason] += 1
            places.update([letter.origin] if letter.origin else [])
        _require_one_disposition_each(places, ends)
        return fates


def _require_one_disposition_each(places: Counter[tuple[int, int]], ends: Offsets) -> None:
    expected = {(partition, offset) for partition, end in ends.items() for offset in range(end)}
    if wrong := [place for place in expected | set(places) if places[place] != 1]:
        raise ContractError(f"{len(wrong)} messages have no fate or several, the first is {min(wrong)}")


def _sound() -> list[Outgoing]:
    """The smallest recorded messages."""
    found = [Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in archive.read(RECORDED)]
    return sorted(found, key=lambda message: len(message.value))[:NUM_SOUND]


if __name__ == "__main__":
    typer.run(main)
