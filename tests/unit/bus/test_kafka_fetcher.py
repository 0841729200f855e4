"""The search behind offsets that a broker cannot read, without a broker. With one: tests/attack/test_topics.py."""

from types import SimpleNamespace

import pytest

kafka_fetcher = pytest.importorskip("omnidraft.bus.kafka_fetcher", reason="the kafka extra is not installed")
PARTITION = kafka_fetcher.TopicPartition("traces", 0)


class NoConnection(kafka_fetcher.TolerantFetcher):
    """Gets its answers from the test."""

    _sensors, _enable_incremental_fetch_sessions = None, False

    def __init__(self): ...


class Broker:
    """A consumer of a broker that has nothing at these offsets, and answers these polls, from 0, so throttled that they
    bring nothing either, as one does whose quota is used up."""

    def __init__(self, lost, throttled=()):
        self._lost, self._throttled, self._num_polls, self._offset = lost, throttled, 0, 0
        self._fetcher = NoConnection()

    def assign(self, partitions): ...

    def seek(self, partition, offset):
        self._offset = offset

    def poll(self, timeout_ms, max_records):
        is_throttled = self._num_polls in self._throttled
        self._num_polls += 1
        answer = SimpleNamespace(API_VERSION=12, throttle_time_ms=9_000 if is_throttled else 0, responses=())
        self._fetcher._handle_fetch_response(1, {}, 0.0, answer)
        return {} if is_throttled or self._offset in self._lost else {PARTITION: ["record"]}


def search(broker):
    return kafka_fetcher.first_readable_offset(broker, PARTITION, 5, 1_000)


def test_the_search_ends_at_the_first_offset_behind_a_damage():
    assert search(Broker(range(5, 77))) == 77


@pytest.mark.parametrize("throttled", [{0, 1, 2, 4, 5, 6, 7}, range(9)], ids=["it gave something between", "begins so"])
def test_a_broker_that_throttles_has_no_damaged_log(throttled):
    assert search(Broker((), throttled)) == 5


def test_what_a_throttling_broker_cannot_read_is_not_known():
    assert search(Broker(range(5, 77), {3})) == 5
