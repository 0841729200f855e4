"""The reader of request statistics starts near the end, reads each record once, and only those of its pair."""

import threading
import time
from itertools import islice

import numpy as np
import pytest

from omnidraft.errors import BusError, OffsetOutOfRange
from omnidraft.fleet.request_stats import HISTORY_MESSAGES, RequestStatsReader, request_stats
from omnidraft.ports import Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.tiny_engine import PATIENCE_S
from tests.trace_records import make_record
from tests.unit.fleet.served import serve


def traffic(log):
    return RequestStatsReader(MemoryReader(log, "traces"), target="big", drafter="org/small")


def test_a_record_counts_the_passes_whose_first_candidate_was_right():
    record = make_record(num_emitted=6)
    record.rounds.num_nodes_R[1] = 0  # nothing was drafted in the second of three passes
    record.rounds.accepted_M[:] = [1, 0, 0, 0, 0, 0]
    told = request_stats(record)
    assert (told.num_drafted, told.num_agreed, told.num_tokens) == (2, 1, 6)
    assert np.isclose(told.seconds, 3 * (0.05 + 0.18))


def test_each_record_is_told_once_and_those_of_other_pairs_and_broken_ones_never():
    log = MemoryLog()
    writer = MemoryWriter(log, "traces")
    watched = traffic(log)
    serve(writer, 1, 3, seconds=0.1)
    serve(writer, 1, 2, seconds=0.1, target="other")
    writer.append([Outgoing(b"k", b"noise", {"target": b"big", "schema": b"omnidraft.trace", "schema_version": b"1"})])
    assert len(list(watched.new())) == 3
    serve(writer, 2, 1, seconds=0.1, first=9)
    assert [told.version for told in watched.new()] == [2]
    assert list(watched.new()) == []


def test_after_a_start_only_the_newest_records_are_read():
    log = MemoryLog()
    serve(MemoryWriter(log, "traces"), 1, HISTORY_MESSAGES + 20, seconds=0.1)
    assert len(list(traffic(log).new())) == HISTORY_MESSAGES


class Unsteady(MemoryReader):
    """A log of which some polls fail, and that may lose its oldest messages."""

    num_steady = 10**6
    first = 0

    def poll(self, max_messages, timeout_s):
        self.num_steady -= 1
        if self.num_steady < 0:
            self.num_steady = 10**6
            raise BusError("the broker blinked")
        if any(position < self.first for position in self._positions.values()):
            raise OffsetOutOfRange("retention passed it")
        return super().poll(max_messages, timeout_s)

    def first_offsets(self):
        return dict.fromkeys(self.partitions(), self.first)

    def replace_log(self, log):
        super().__init__(log, "traces")


@pytest.fixture(params=[1, 3], ids=["one partition", "three partitions"])
def unsteady(request):
    """The writer, the unsteady reader of a log with 20 old records of version 1, and the statistics from it."""
    log = MemoryLog(request.param)
    writer, reader = MemoryWriter(log, "traces"), Unsteady(log, "traces")
    serve(writer, 1, 20, seconds=0.1)
    return writer, reader, RequestStatsReader(reader, target="big", drafter="org/small")


@pytest.mark.parametrize("num_steady", [0, 1, 4, 7])
def test_an_error_of_the_log_yields_nothing_twice_and_skips_nothing(unsteady, num_steady):
    writer, reader, stats = unsteady
    assert len(list(stats.new())) == 20
    serve(writer, 2, 20, seconds=0.1)
    reader.num_steady, told = num_steady, []
    for _ in range(2):
        try:
            for each in stats.new():
                told.append(each)
        except BusError:
            pass
    assert [(each.version, each.is_past) for each in told] == [(2, False)] * 20
    assert reader.num_steady > 1000, "no poll failed"
    assert list(stats.new()) == []


def test_a_caller_that_stops_halfway_gets_the_rest_from_its_next_call(unsteady):
    _, _, stats = unsteady
    assert len(list(islice(stats.new(), 7))) == 7
    rest = list(stats.new())
    assert (len(rest), all(each.is_past for each in rest)) == (13, True)


def test_what_retention_took_is_passed_over():
    log = MemoryLog()
    writer, reader = MemoryWriter(log, "traces"), Unsteady(log, "traces")
    serve(writer, 1, 20, seconds=0.1)
    stats = RequestStatsReader(reader, target="big", drafter="org/small")
    assert len(list(stats.new())) == 20
    serve(writer, 2, 20, seconds=0.1)
    reader.first = 30
    with pytest.raises(OffsetOutOfRange):
        list(stats.new())
    assert [each.is_past for each in stats.new()] == [False] * 10


def test_of_a_log_that_was_created_anew_with_fewer_partitions_the_records_since_are_new():
    old, log = MemoryLog(partitions=3), MemoryLog()
    serve(MemoryWriter(old, "traces"), 1, 40, seconds=0.1)
    reader = Unsteady(old, "traces")
    stats = RequestStatsReader(reader, target="big", drafter="org/small")
    assert len(list(stats.new())) == 40
    reader.num_steady = 0
    with pytest.raises(BusError):
        list(stats.new())
    reader.replace_log(log)
    writer = MemoryWriter(log, "traces")
    serve(writer, 2, 3, seconds=0.1)
    assert list(stats.new()) == []
    serve(writer, 2, 4, seconds=0.1, first=3)
    assert [each.is_past for each in stats.new()] == [False] * 4


def test_a_log_that_does_not_answer_holds_its_reader_up_for_a_moment_only(monkeypatch):
    """As where its key store is silent."""
    monkeypatch.setattr("omnidraft.fleet.request_stats.ANSWER_S", 0.05)
    log, answers = MemoryLog(), threading.Event()

    class Silent(MemoryReader):
        def poll(self, max_messages, timeout_s):
            answers.wait(PATIENCE_S)
            return super().poll(max_messages, timeout_s)

    stats = RequestStatsReader(Silent(log, "traces"), target="big", drafter="org/small")
    serve(MemoryWriter(log, "traces"), 2, 20, seconds=0.1)
    started = time.monotonic()
    assert (list(stats.new()), list(stats.new())) == ([], [])
    assert time.monotonic() - started < PATIENCE_S / 2
    assert not stats.is_at_end
    answers.set()
    monkeypatch.setattr("omnidraft.fleet.request_stats.ANSWER_S", PATIENCE_S)
    assert len(list(stats.new())) == 20
    assert stats.is_at_end
