"""What happened to a pair is told once, in order, and only what somebody genuine announced."""

from dataclasses import replace

import pytest

from omnidraft.errors import SignatureRefused
from omnidraft.fleet import control_log
from omnidraft.fleet.control_history import MOST_EVENTS, ControlEvent, read_control_history
from omnidraft.fleet.control_log import parse_announcement
from omnidraft.ports import Announcement, Message, Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter

PAIR = {"target": "big", "drafter": "small"}


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(partitions=2)


@pytest.fixture
def writer(log: MemoryLog) -> MemoryWriter:
    return MemoryWriter(log, "control")


def told(log: MemoryLog, **fields: object) -> list[tuple[str, int | None, str]]:
    events = read_control_history(MemoryReader(log, "control"), **PAIR, timeout_s=0, **fields)
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
    announce(writer, "drift", tenant="t", reason="agreement fell", **PAIR)
    announce(writer, "champion", 1, **PAIR)
    announce(writer, "drift_over", tenant="t", **PAIR)
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


def test_the_newest_events_are_told_and_an_old_champion_is_no_promotion(
    log: MemoryLog, writer: MemoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_log.publish_announcement(writer, "champion", 5, **PAIR)
    for _ in range(MOST_EVENTS):
        control_log.publish_announcement(writer, "pause", **PAIR)
        control_log.publish_announcement(writer, "resume", **PAIR)
    assert len(told(log)) == MOST_EVENTS
    assert {kind for kind, _, _ in told(log)} == {"paused", "resumed"}
    control_log.publish_announcement(writer, "champion", 5, **PAIR)
    control_log.publish_announcement(writer, "champion", 6, **PAIR)
    monkeypatch.setattr("omnidraft.fleet.control_history.MOST_MESSAGES", 2)
    assert told(log) == [("promoted", 6, "")]


def test_what_nobody_genuine_sent_and_what_is_unreadable_is_left_out(log: MemoryLog, writer: MemoryWriter) -> None:
    class Distrusts7:
        def authenticate(self, message: Message) -> Announcement:
            announcement = parse_announcement(message)
            if announcement.version == 7:
                raise SignatureRefused("not genuine")
            return announcement

        def accept(self, announcement: Announcement) -> None:
            raise AssertionError("reading a history accepts nothing")

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
            raise AssertionError("reading a history accepts nothing")

    for version in (5, 6, 5):
        control_log.publish_announcement(writer, "champion", version, **PAIR)
    assert told(log, authenticator=SignedWithItsVersion()) == [("promoted", 5, ""), ("promoted", 6, "")]


def test_no_topic_has_no_history(log: MemoryLog) -> None:
    events: tuple[ControlEvent, ...] = read_control_history(MemoryReader(log, "none"), **PAIR, timeout_s=0)
    assert events == ()
