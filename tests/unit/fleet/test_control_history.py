"""What happened to a pair is told once, in order, and only what somebody genuine announced."""

from dataclasses import replace

import pytest

from omnidraft.errors import OffsetOutOfRange, SignatureRefused
from omnidraft.fleet import control_log
from omnidraft.fleet.control_log import parse_announcement
from omnidraft.fleet.control_state import read_control_state
from omnidraft.ports import Announcement, LogReader, Message, Outgoing, PollResult
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.silent_reader import SilentReader

PAIR = {"target": "big", "drafter": "small"}


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(partitions=2)


@pytest.fixture
def writer(log: MemoryLog) -> MemoryWriter:
    return MemoryWriter(log, "control")


def told(log: MemoryLog, **fields: object) -> list[tuple[str, int | None, str]]:
    return told_by(MemoryReader(log, "control"), **fields)


def told_by(reader: LogReader, **fields: object) -> list[tuple[str, int | None, str]]:
    events = read_control_state(reader, CountingMetrics(), **PAIR, timeout_s=0.1, **fields).events
    assert [each.at_ms for each in events] == sorted(each.at_ms for each in events)
    return [(each.kind, each.version, each.reason) for each in events]


def test_the_history_of_a_pair(log: MemoryLog, writer: MemoryWriter) -> None:
    announce = control_log.publish_announcement
    announce(writer, "champion", 1, **PAIR)
    announce(writer, "champion", 1, **PAIR)  # a controller that started again
    announce(writer, "champion", 9, target="huge", drafter="small")
    announce(writer, "resume", **PAIR)  # it learned all the time
    announce(writer, "pause")
    announce(writer, "pause", **PAIR)
    announce(writer, "resume", **PAIR)
    announce(writer, "canary", 2, share=0.1, reason="looks better", **PAIR)
    announce(writer, "champion", 2, **PAIR)
    announce(writer, "canary", 3, share=0.1, **PAIR)
    announce(writer, "champion", 2, **PAIR)
    announce(writer, "drift", tenant="t", work="text", reason="agreement fell", **PAIR)
    announce(writer, "champion", 1, **PAIR)
    announce(writer, "drift_over", tenant="t", work="text", **PAIR)
    announce(writer, "rewind", 1, restart_id="r", **PAIR)
    announce(writer, "forget", tenant="t", forget_id="f", until_ms=1)
    assert told(log) == [
        ("promoted", 1, ""),
        ("paused", None, ""),
        ("resumed", None, ""),
        ("canary", 2, "looks better"),
        ("promoted", 2, ""),
        ("canary", 3, ""),
        ("canary over", 2, ""),
        ("drift", None, "agreement fell"),
        ("rolled back", 1, ""),
        ("drift over", None, "t"),
        ("rewound", 1, ""),
    ]


def test_a_log_that_is_read_from_its_first_message_again_is_told_once(log: MemoryLog, writer: MemoryWriter) -> None:
    class FailsOnce(MemoryReader):
        num_polls = 0

        def poll(self, max_messages: int, timeout_s: float) -> PollResult:
            self.num_polls += 1
            if self.num_polls == 2:
                raise OffsetOutOfRange("it lost its end")
            return super().poll(max_messages, timeout_s)

    for version in range(1, 6):
        control_log.publish_announcement(writer, "canary", version, share=0.1, **PAIR)
    assert told_by(FailsOnce(log, "control")) == [("canary", version, "") for version in range(1, 6)]


def test_what_nobody_genuine_sent_and_what_is_unreadable_is_left_out(log: MemoryLog, writer: MemoryWriter) -> None:
    class Distrusts7:
        def authenticate(self, message: Message) -> Announcement:
            announcement = parse_announcement(message)
            if announcement.version == 7:
                raise SignatureRefused("not genuine")
            return announcement

        def accept(self, announcement: Announcement) -> None: ...

    writer.append([Outgoing(b"control", b"no JSON", partition=0)])
    control_log.publish_announcement(writer, "champion", 7, **PAIR)
    control_log.publish_announcement(writer, "champion", 6, **PAIR)
    assert told(log, authenticator=Distrusts7()) == [("promoted", 6, "")]
    assert told(log) == [("promoted", 7, ""), ("rolled back", 6, "")]


def test_an_old_announcement_that_somebody_sends_again_is_no_event(log: MemoryLog, writer: MemoryWriter) -> None:
    class SignedWithItsVersion:
        def authenticate(self, message: Message) -> Announcement:
            announcement = parse_announcement(message)
            return replace(announcement, sequence=announcement.version or 0)

        def accept(self, announcement: Announcement) -> None:
            raise SignatureRefused("too old to serve, yet it happened")

    for version in (5, 6, 5):
        control_log.publish_announcement(writer, "champion", version, **PAIR)
    assert told(log, authenticator=SignedWithItsVersion()) == [("promoted", 5, ""), ("promoted", 6, "")]


def test_a_slow_log_hides_no_pause(log: MemoryLog, writer: MemoryWriter) -> None:
    control_log.publish_announcement(writer, "pause", **PAIR)
    reader = SilentReader(log, "control", (0, 1))
    assert read_control_state(reader, CountingMetrics(), **PAIR, timeout_s=0.1).is_learning_paused
