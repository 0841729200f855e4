"""Offsets that a broker itself cannot read, because the files of its log are damaged: where it can read again.

It answers a fetch there with an error, or with nothing, for ever. An offset counts as unreadable only when it was asked
for alone and gave nothing twice, before and after a later one was read: a slow broker, or one whose disk is gone, does
not look like that.
"""

from contextlib import suppress

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import CorruptRecordError, OffsetOutOfRangeError

UNREADABLE_ERRORS = (CorruptRecordError, OffsetOutOfRangeError)
"""What is raised at an offset that lies between the ends of its partition."""
START_TIMEOUT_MS = 2_000
"""For the offset in doubt, each time."""
PROBE_TIMEOUT_MS = 300
"""For one behind it."""
STRIDE_DIVISOR = 8
"""Steps grow with the distance, by this part of it."""


def first_readable_offset(consumer: KafkaConsumer, partition: TopicPartition, start: int, end: int) -> int:
    """The first offset from `start` on that can be read; `start` too when none before `end` can.

    Args:
        consumer: of nobody else; it is assigned and moved.

    Raises:
        KafkaError: the broker cannot be reached.
    """
    consumer.assign([partition])
    if _is_readable(consumer, partition, start, START_TIMEOUT_MS):
        return start
    unreadable, readable = _next_readable(consumer, partition, start, end)
    while readable - unreadable > 1:
        between = (unreadable + readable) // 2
        if _is_readable(consumer, partition, between, PROBE_TIMEOUT_MS):
            readable = between
        else:
            unreadable = between
    return start if _is_readable(consumer, partition, start, START_TIMEOUT_MS) else readable


def _next_readable(consumer: KafkaConsumer, partition: TopicPartition, start: int, end: int) -> tuple[int, int]:
    """The last offset that was tried in vain, and one that can be read; `start` twice when there is none."""
    unreadable, tried = start, start + 1
    while tried < end:
        if _is_readable(consumer, partition, tried, PROBE_TIMEOUT_MS):
            return unreadable, tried
        unreadable, tried = tried, tried + 1 + (tried - start) // STRIDE_DIVISOR
    return start, start


def _is_readable(consumer: KafkaConsumer, partition: TopicPartition, offset: int, timeout_ms: int) -> bool:
    consumer.seek(partition, offset)
    with suppress(*UNREADABLE_ERRORS):
        return bool(consumer.poll(timeout_ms=timeout_ms, max_records=1))
    return False
