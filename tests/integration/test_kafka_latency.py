"""How long an append to a real broker takes."""

import time
import uuid

import pytest

from omnidraft.ports import Outgoing

pytestmark = pytest.mark.kafka

LINGER_MS = 3_000


def test_an_append_does_not_linger_for_messages_that_nobody_can_send_meanwhile(kafka_bootstrap: str) -> None:
    """A batch waits `linger_ms` to be filled; an append has given all it has, so it is sent at once."""
    from omnidraft.bus.kafka_log import KafkaReader, KafkaWriter

    topic = f"latency-{uuid.uuid4().hex[:8]}"
    writer = KafkaWriter(kafka_bootstrap, topic, linger_ms=LINGER_MS)
    writer.append([Outgoing(b"k", b"first")])
    started = time.monotonic()
    for number in range(3):
        writer.append([Outgoing(b"k", b"%d" % number), Outgoing(b"l", b"more")])
    assert time.monotonic() - started < LINGER_MS / 1000
    reader = KafkaReader(kafka_bootstrap, topic)
    assert reader.end_offsets() == {0: 7}
    writer.close()
    reader.close()
