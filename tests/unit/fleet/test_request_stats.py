"""The reader of request statistics starts near the end, reads each record once, and only those of its pair."""

import numpy as np

from omnidraft.fleet.request_stats import HISTORY_MESSAGES, RequestStatsReader, request_stats
from omnidraft.ports import Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
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
