"""Find the next readable offset behind those that a broker cannot read, because the files of its log are damaged.

The broker answers a fetch there with an error, or with nothing, for ever. An offset counts as unreadable only when it
was fetched alone and gave nothing twice, before and after a later one was read: a slow broker, or one whose disk is
gone, does not behave like that.
"""

from contextlib import suppress

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import CorruptRecordError, OffsetOutOfRangeError

UNREADABLE_ERRORS = (CorruptRecordError, OffsetOutOfRangeError)
"""Errors that a fetch raises at such an offset, although it lies between the ends of its partition."""
START_TIMEOUT_MS = 2_000
"""Timeout of each fetch at the first offset."""
PROBE_TIMEOUT_MS = 300
"""Timeout of a fetch at a later offset."""
STRIDE_DIVISOR = 8
"""The step to the next probe grows by the distance so far, divided by this."""


def first_readable_offset(consumer: KafkaConsumer, partition: TopicPartition, start: int, end: int) -> int:
    """Return the first readable offset from `start` on, or `start` when none before `end` can be read.

    Args:
        consumer: used by nobody else; it is assigned and sought.

    Raises:
        KafkaError: the broker cannot be reached.
    """
    consumer.assign([partition])
    if _is_readable(consumer, partition, start, START_TIMEOUT_MS):
        return start
    unreadable, readable = _next_readable(consumer, partition, start, end)
    while readable - unreadable > 1:
        middle = (unreadable + readable) // 2
        if _is_readable(consumer, partition, middle, PROBE_TIMEOUT_MS):
            readable = middle
        else:
            unreadable = middle
    return start if _is_readable(consumer, partition, start, START_TIMEOUT_MS) else readable


def _next_readable(consumer: KafkaConsumer, partition: TopicPartition, start: int, end: int) -> tuple[int, int]:
    """Return the last unreadable offset that was probed and a readable one; `start` twice when there is none."""
    unreadable, probe = start, start + 1
    while probe < end:
        if _is_readable(consumer, partition, probe, PROBE_TIMEOUT_MS):
            return unreadable, probe
        unreadable, probe = probe, probe + 1 + (probe - start) // STRIDE_DIVISOR
    return start, start


def _is_readable(consumer: KafkaConsumer, partition: TopicPartition, offset: int, timeout_ms: int) -> bool:
    consumer.seek(partition, offset)
    with suppress(*UNREADABLE_ERRORS):
        return bool(consumer.poll(timeout_ms=timeout_ms, max_records=1))
    return False
