"""A topic that takes less than a trace record may have, as an operator or a provider made it."""

import uuid
from contextlib import closing

import numpy as np
import pytest
from kafka import KafkaAdminClient

from omnidraft.bus.kafka_log import KafkaReader, KafkaWriter
from omnidraft.config import RecorderSettings
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.telemetry.metrics import CountingMetrics
from tests.trace_records import make_record

pytestmark = pytest.mark.kafka


def test_a_record_that_the_topic_never_takes_is_dropped_and_the_others_arrive(kafka_bootstrap: str) -> None:
    topic, metrics = f"narrow-{uuid.uuid4().hex}", CountingMetrics()
    with closing(KafkaAdminClient(bootstrap_servers=kafka_bootstrap)) as admin:
        narrow = {"num_partitions": 1, "configs": {"max.message.bytes": "20000"}}
        admin.create_topics({topic: narrow}, wait_for_metadata=True)
    prompt_ids = np.random.default_rng(0).integers(0, 150_000, 50_000, dtype=np.uint32)
    producer = TraceProducer(lambda: KafkaWriter(kafka_bootstrap, topic), RecorderSettings(), metrics)
    names = [f"r{number:03d}" for number in range(200)]
    for name in names:
        producer.emit(make_record(name))
        if name == "r050":
            producer.emit(make_record("long", prompt_ids=prompt_ids))
    assert producer.close(60.0) == 0
    assert metrics.value("omnidraft_traces_dropped_total", reason="too_large") == 1
    assert metrics.value("omnidraft_traces_acknowledged_total") == len(names)
    arrived = set[str]()
    with closing(KafkaReader(kafka_bootstrap, topic)) as reader:
        while messages := reader.poll(500, timeout_s=2.0).messages:
            arrived |= {message.key.decode() for message in messages}
    assert sorted(arrived) == names
