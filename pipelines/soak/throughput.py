"""Records a second through one Kafka topic, with a writer process and a reader process like a worker's and a learner's.

Contents are cut from recorded traffic, so that they compress as trace records do.
"""

import multiprocessing as mp
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import psutil

from omnidraft.demo.local_cluster import ServiceFailed, empty_folder
from omnidraft.demo.recorded import RECORDED
from omnidraft.ports import Outgoing
from omnidraft.progress import bar
from omnidraft.traces import archive, codec
from pipelines.lib.check_result import CheckResult
from pipelines.soak.cluster import BROKER, Cluster
from pipelines.soak.plan import SoakPlan

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


def run(plan: SoakPlan) -> CheckResult:
    """Measure each rate in a topic of its own."""
    figures: dict[str, Any] = {}
    assertions: dict[str, bool] = {}
    with Cluster(empty_folder(plan.out / "throughput"), "[worker]") as cluster:
        cluster.start(BROKER)
        servers = cluster.settings.log.url.removeprefix("kafka://")
        for size_bytes, per_s in RATES.items():
            load = TopicLoad(servers, f"load-{size_bytes}-{time.time_ns()}", size_bytes, per_s, plan.hold_s)
            rates = measure(load, cluster)
            rates["most_per_s"] = measure(unpaced(load), cluster)["written_per_s"]
            figures[str(size_bytes)] = rates
            name = (
                f"{per_s:,} records/s of {size_bytes // 1000} kB are sustained through one topic for {plan.hold_s:g} s"
            )
            assertions[name] = rates["is_sustained"]
    return CheckResult(figures, assertions)


def unpaced(load: TopicLoad) -> TopicLoad:
    """Return the same load, written as fast as possible."""
    num = load.num * UNPACED_SHARE
    return replace(load, topic=f"{load.topic}-unpaced", per_s=UNPACED_PER_S, seconds=num / UNPACED_PER_S)


def measure(load: TopicLoad, cluster: Cluster) -> dict[str, Any]:
    """Return rates, delays and the processor time of writer, reader and broker.

    Raises:
        ServiceFailed: writer or reader ended early.
    """
    context = mp.get_context("spawn")
    (from_reader, reader_end), (from_writer, writer_end) = context.Pipe(False), context.Pipe(False)
    reader = context.Process(target=_read, args=(load, reader_end), daemon=True)
    reader.start()
    reader_end.close()  # the process has the only one, so that its end is seen here
    _received(from_reader, "reader")  # it is at the beginning of the topic
    writer = context.Process(target=_write, args=(load, writer_end), daemon=True)
    broker_before = _cpu_s(cluster)
    writer.start()
    writer_end.close()
    try:
        written, read = _outcome(from_writer, load), _received(from_reader, "reader")
    finally:
        for process in (writer, reader):
            process.terminate()
            process.join()
    took_s = written["ended_s"] - written["started_s"]
    late_s = read["ended_s"] - written["ended_s"]
    return {
        "asked_per_s": load.per_s,
        "size_bytes": load.size_bytes,
        "records": load.num,
        "written_per_s": round(written["num"] / took_s, 1),
        "read": read["num"],
        "read_late_s": round(late_s, 2),
        "out_of_order": read["num_out_of_order"],
        "behind_s": round(took_s - load.seconds, 2),
        "is_sustained": took_s - load.seconds <= BEHIND_S and read["num"] == load.num and late_s <= LATE_S,
        "writer_cores": round(written["cpu_s"] / took_s, 2),
        "reader_cores": round(read["cpu_s"] / took_s, 2),
        "broker_cores": round((_cpu_s(cluster) - broker_before) / took_s, 2),
        "written_by_second": _by_second(written["by_second"], took_s),
        "read_by_second": _by_second(read["by_second"], took_s),
    }


def _outcome(writer: Connection, load: TopicLoad) -> dict[str, Any]:
    """Return the writer's last message; show its progress until then."""
    with bar(f"{load.size_bytes // 1000} kB records written", load.num) as advance:
        before = 0
        while True:
            message = _received(writer, "writer")
            advance(message["num"] - before)
            before = message["num"]
            if "ended_s" in message:
                outcome: dict[str, Any] = message
                return outcome


def _received(receiver: Connection, name: str) -> Any:
    try:
        return receiver.recv()
    except EOFError as exc:
        raise ServiceFailed(f"the {name} of the topic ended before its figures; its error is above") from exc


def _write(load: TopicLoad, sender: Connection) -> None:
    """Write the records that are due, at most BATCH_RECORDS at a time, each batch acknowledged before the next."""
    from omnidraft.bus.kafka_log import KafkaWriter

    values = _values(load.size_bytes)
    writer = KafkaWriter(load.servers, load.topic)
    num, by_second, started_s, before_s = 0, Counter[int](), time.time(), time.process_time()
    while num < load.num:
        due = min(load.num, int((time.time() - started_s) * load.per_s))
        size = min(BATCH_RECORDS, due - num)
        if size < BATCH_RECORDS and due < load.num:
            time.sleep(BATCH_RECORDS / load.per_s / 4)
            continue
        writer.append([Outgoing(b"%d" % (num + k), values[(num + k) % len(values)]) for k in range(size)])
        num += size
        second = int(time.time() - started_s)
        if second not in by_second:
            sender.send({"num": num})
        by_second[second] += size
    ended_s = time.time()
    writer.close()
    cpu_s = time.process_time() - before_s
    sender.send({"num": num, "started_s": started_s, "ended_s": ended_s, "cpu_s": cpu_s, "by_second": dict(by_second)})


def _read(load: TopicLoad, sender: Connection) -> None:
    """Read until all records came, or none for GIVE_UP_S."""
    from omnidraft.bus.kafka_log import KafkaReader

    reader = KafkaReader(load.servers, load.topic)
    sender.send("ready")
    num, num_out_of_order, by_second = 0, 0, Counter[int]()
    started_s = received_s = time.time()
    before_s = time.process_time()
    while num < load.num and time.time() - received_s < GIVE_UP_S:
        messages = reader.poll(500, 0.5).messages
        if not messages:
            continue
        if not num:
            started_s, before_s = time.time(), time.process_time()
        received_s = time.time()
        num_out_of_order += sum(int(message.key) != num + index for index, message in enumerate(messages))
        num += len(messages)
        by_second[int(received_s - started_s)] += len(messages)
    cpu_s = time.process_time() - before_s
    reader.close()
    outcome = {"num": num, "num_out_of_order": num_out_of_order, "ended_s": received_s, "cpu_s": cpu_s}
    sender.send(outcome | {"by_second": dict(by_second)})


def _values(size_bytes: int) -> list[bytes]:
    """Return distinct contents of this size."""
    pool = b"".join(codec.encode(record) for record in archive.read(RECORDED))
    starts = range(0, len(pool) - size_bytes, max(1, (len(pool) - size_bytes) // 256))
    return [pool[start : start + size_bytes] for start in starts]


def _by_second(counts: Mapping[int, int], took_s: float) -> list[int]:
    """Return the records of each full second."""
    return [counts.get(second, 0) for second in range(int(took_s))]


def _cpu_s(cluster: Cluster) -> float:
    times = psutil.Process(cluster.processes.pid(BROKER)).cpu_times()
    return times.user + times.system
