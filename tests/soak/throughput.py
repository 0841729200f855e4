"""Records a second through one Kafka topic, with a writer process and a reader process like a worker's and a learner's.

Contents are cut from recorded traffic, so that they compress as trace records do.
"""

import multiprocessing as mp
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from typing import Any

import psutil

from omnidraft.demo.local_cluster import ServiceFailed
from omnidraft.demo.recorded import RECORDED
from omnidraft.ports import Outgoing
from omnidraft.traces import archive, codec
from tests.soak.cluster import BROKER, Cluster, empty_folder
from tests.soak.part import PartResult, SoakPlan

RATES = {2_000: 5_000, 30_000: 300}
"""Bytes of a record -> records a second."""
BATCH_RECORDS = 128
"""The batch size of a worker's trace producer."""
BEHIND_S = 0.5
"""The delay that is allowed until the last record is acknowledged. A writer that is too slow falls further behind."""
LATE_S = 1.0
"""The delay that is allowed from then until the reader has it."""
GIVE_UP_S = 20.0
"""Seconds without a record after which the reader stops."""
UNPACED_PER_S = 10_000_000
UNPACED_SHARE = 0.3
"""The number of records of the unpaced run, as a share of the paced one's."""


@dataclass(frozen=True, slots=True)
class TopicLoad:
    """The records of one run."""

    servers: str
    topic: str
    size_bytes: int
    per_s: int
    seconds: float

    @property
    def num(self) -> int:
        return round(self.per_s * self.seconds)


def run(plan: SoakPlan) -> PartResult:
    """Measure each rate in a topic of its own, and then how fast as many records can be written."""
    figures: dict[str, Any] = {}
    assertions: dict[str, bool] = {}
    with Cluster(empty_folder(plan.out / "throughput"), "[worker]") as cluster:
        cluster.bring_up(BROKER)
        servers = cluster.settings.log.url.removeprefix("kafka://")
        for size_bytes, per_s in RATES.items():
            load = TopicLoad(servers, f"load-{size_bytes}", size_bytes, per_s, plan.hold_s)
            rates = measure(load, cluster)
            seconds = load.num * UNPACED_SHARE / UNPACED_PER_S
            unpaced = replace(load, topic=f"{load.topic}-unpaced", per_s=UNPACED_PER_S, seconds=seconds)
            rates["most_per_s"] = measure(unpaced, cluster)["written_per_s"]
            figures[str(size_bytes)] = rates
            held = (
                f"{per_s:,} records/s of {size_bytes // 1000} kB are sustained through one topic for {plan.hold_s:g} s"
            )
            assertions[held] = rates["is_sustained"]
    return PartResult(figures, assertions)


def measure(load: TopicLoad, cluster: Cluster) -> dict[str, Any]:
    """Return rates, delays and the processor time of writer, reader and broker. Raises ServiceFailed when one ends."""
    context = mp.get_context("spawn")
    is_reading = context.Event()
    with ProcessPoolExecutor(2, context, initializer=_share, initargs=(is_reading,)) as pool:
        broker_before = _cpu_s(cluster)
        reader, writer = pool.submit(_read, load), pool.submit(_write, load)
        try:
            written, read = writer.result(), reader.result()
        except BrokenProcessPool as exc:
            raise ServiceFailed("the writer or the reader of the topic ended before its figures") from exc
    took_s = written["ended_s"] - written["started_s"]
    late_s = read["ended_s"] - written["ended_s"]
    return {
        "asked_per_s": load.per_s,
        "size_bytes": load.size_bytes,
        "records": load.num,
        "written_per_s": round(load.num / took_s, 1),
        "read": read["num"],
        "read_late_s": round(late_s, 2),
        "out_of_order": read["num_out_of_order"],
        "behind_s": round(took_s - load.seconds, 2),
        "is_sustained": took_s - load.seconds <= BEHIND_S and read["num"] == load.num and late_s <= LATE_S,
        "writer_cores": round(written["cpu_s"] / took_s, 2),
        "reader_cores": round(read["cpu_s"] / took_s, 2),
        "broker_cores": round((_cpu_s(cluster) - broker_before) / took_s, 2),
    }


def _share(is_reading: Event) -> None:
    """Give each process of the pool the event that says that the reader is at the beginning of the topic."""
    global _is_reading
    _is_reading = is_reading


def _write(load: TopicLoad) -> dict[str, float]:
    """Write the records that are due, at most BATCH_RECORDS at a time, each batch acknowledged before the next."""
    from omnidraft.bus.kafka_log import KafkaWriter

    values = _values(load.size_bytes)
    writer = KafkaWriter(load.servers, load.topic)
    _is_reading.wait(GIVE_UP_S)
    num, started_s, before_s = 0, time.time(), time.process_time()
    while num < load.num:
        due = min(load.num, int((time.time() - started_s) * load.per_s))
        size = min(BATCH_RECORDS, due - num)
        if size < BATCH_RECORDS and due < load.num:
            time.sleep(BATCH_RECORDS / load.per_s / 4)
            continue
        writer.append([Outgoing(b"%d" % (num + k), values[(num + k) % len(values)]) for k in range(size)])
        num += size
    ended_s = time.time()
    writer.close()
    return {"started_s": started_s, "ended_s": ended_s, "cpu_s": time.process_time() - before_s}


def _read(load: TopicLoad) -> dict[str, float]:
    """Read until all records came, or none for GIVE_UP_S."""
    from omnidraft.bus.kafka_log import KafkaReader

    reader = KafkaReader(load.servers, load.topic)
    _is_reading.set()
    num, num_out_of_order, received_s, before_s = 0, 0, time.time(), time.process_time()
    while num < load.num and time.time() - received_s < GIVE_UP_S:
        messages = reader.poll(500, 0.5).messages
        if messages:
            received_s = time.time()
        num_out_of_order += sum(int(message.key) != num + index for index, message in enumerate(messages))
        num += len(messages)
    cpu_s = time.process_time() - before_s
    reader.close()
    return {"num": num, "num_out_of_order": num_out_of_order, "ended_s": received_s, "cpu_s": cpu_s}


def _values(size_bytes: int) -> list[bytes]:
    """Return distinct contents of this size."""
    pool = b"".join(codec.encode(record) for record in archive.read(RECORDED))
    starts = range(0, len(pool) - size_bytes, max(1, (len(pool) - size_bytes) // 256))
    return [pool[start : start + size_bytes] for start in starts]


def _cpu_s(cluster: Cluster) -> float:
    times = psutil.Process(cluster.pid(BROKER)).cpu_times()
    return times.user + times.system
