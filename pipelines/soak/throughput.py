"""Records a second through one Kafka topic: a writer process and a reader process, as a worker and a learner have them.

Contents are cut from recorded traffic, so that they compress as trace records do.
"""

import multiprocessing as mp
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from omnidraft.ports import Outgoing
from omnidraft.traces import archive, codec
from pipelines.lib.check_result import CheckResult
from pipelines.lib.local_cluster import emptied
from pipelines.lib.progress import bar
from pipelines.soak.cluster import BROKER, Cluster
from pipelines.soak.plan import SoakPlan

RECORDED = Path(__file__).parents[1] / "data" / "gsm8k_qwen1.5b.avro"
RATES = {2_000: 5_000, 30_000: 300}
"""Bytes of a record -> records a second."""
BATCH_RECORDS = 128
"""As the recorder of a worker sends them."""
BEHIND_S = 0.5
"""How much later than due the last record may be acknowledged. Who is too slow falls behind for as long as it lasts."""
LATE_S = 1.0
"""How long after that the reader may still wait for it."""
GIVE_UP_S = 20.0
"""Without a record."""
UNPACED_PER_S = 10_000_000
UNPACED_SHARE = 0.3
"""Records of the unpaced run, beside the paced one."""


@dataclass(frozen=True, slots=True)
class Load:
    """What goes through."""

    servers: str
    topic: str
    size_bytes: int
    per_s: int
    seconds: float

    @property
    def num(self) -> int:
        return round(self.per_s * self.seconds)


def run(plan: SoakPlan) -> CheckResult:
    """Each rate in a topic of its own."""
    figures: dict[str, Any] = {}
    promises: dict[str, bool] = {}
    with Cluster(emptied(plan.out / "throughput"), "[worker]") as cluster:
        cluster.start(BROKER)
        servers = cluster.settings.log.url.removeprefix("kafka://")
        for size_bytes, per_s in RATES.items():
            load = Load(servers, f"load-{size_bytes}-{time.time_ns()}", size_bytes, per_s, plan.hold_s)
            found = measure(load, cluster)
            found["most_per_s"] = measure(unpaced(load), cluster)["written_per_s"]
            figures[str(size_bytes)] = found
            name = (
                f"{per_s:,} records/s of {size_bytes // 1000} kB are sustained through one topic for {plan.hold_s:g} s"
            )
            promises[name] = found["is_sustained"]
    return CheckResult(figures, promises)


def unpaced(load: Load) -> Load:
    """As fast as it goes."""
    num = load.num * UNPACED_SHARE
    return replace(load, topic=f"{load.topic}-unpaced", per_s=UNPACED_PER_S, seconds=num / UNPACED_PER_S)


def measure(load: Load, cluster: Cluster) -> dict[str, Any]:
    """Rates, and who used how much processor time."""
    context = mp.get_context("spawn")
    (told_read, tell_read), (told_write, tell_write) = context.Pipe(False), context.Pipe(False)
    reader = context.Process(target=_read, args=(load, tell_read), daemon=True)
    reader.start()
    told_read.recv()  # it stands at the beginning of the topic
    writer = context.Process(target=_write, args=(load, tell_write), daemon=True)
    broker_before = _cpu_s(cluster)
    writer.start()
    written, read = _outcome(told_write, load, "written"), told_read.recv()
    for process in (writer, reader):
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


def _outcome(told: Connection, load: Load, what: str) -> dict[str, Any]:
    """The writer's last words; how far it is until then."""
    with bar(f"{load.size_bytes // 1000} kB records {what}", load.num) as advance:
        before = 0
        while True:
            said = told.recv()
            advance(said["num"] - before)
            before = said["num"]
            if "ended_s" in said:
                outcome: dict[str, Any] = said
                return outcome


def _write(load: Load, tell: Connection) -> None:
    """As many as are due, BATCH_RECORDS at most, each batch acknowledged before the next."""
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
            tell.send({"num": num})
        by_second[second] += size
    ended_s = time.time()
    writer.close()
    cpu_s = time.process_time() - before_s
    tell.send({"num": num, "started_s": started_s, "ended_s": ended_s, "cpu_s": cpu_s, "by_second": dict(by_second)})


def _read(load: Load, tell: Connection) -> None:
    """Until all are there, or none came for a while."""
    from omnidraft.bus.kafka_log import KafkaReader

    reader = KafkaReader(load.servers, load.topic)
    tell.send("ready")
    num, num_out_of_order, by_second = 0, 0, Counter[int]()
    started_s = heard_s = time.time()
    before_s = time.process_time()
    while num < load.num and time.time() - heard_s < GIVE_UP_S:
        messages = reader.poll(500, 0.5).messages
        if not messages:
            continue
        if not num:
            started_s, before_s = time.time(), time.process_time()
        heard_s = time.time()
        num_out_of_order += sum(int(message.key) != num + place for place, message in enumerate(messages))
        num += len(messages)
        by_second[int(heard_s - started_s)] += len(messages)
    cpu_s = time.process_time() - before_s
    reader.close()
    outcome = {"num": num, "num_out_of_order": num_out_of_order, "ended_s": heard_s, "cpu_s": cpu_s}
    tell.send(outcome | {"by_second": dict(by_second)})


def _values(size_bytes: int) -> list[bytes]:
    """Distinct contents of this size."""
    pool = b"".join(codec.encode(record) for record in archive.read(RECORDED))
    starts = range(0, len(pool) - size_bytes, max(1, (len(pool) - size_bytes) // 256))
    return [pool[start : start + size_bytes] for start in starts]


def _by_second(found: Mapping[int, int], took_s: float) -> list[int]:
    """The last second is cut off, and left out."""
    return [found.get(second, 0) for second in range(int(took_s))]


def _cpu_s(cluster: Cluster) -> float:
    times = psutil.Process(cluster.fleet.pid(BROKER)).cpu_times()
    return times.user + times.system
