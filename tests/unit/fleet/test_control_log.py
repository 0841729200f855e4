"""The newest value of each key holds, and nothing on the topic can stop its readers."""

import json
from contextlib import closing

import pytest

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter, delete_before
from omnidraft.errors import BusError
from omnidraft.fleet.control_log import MAX_SILENCE_S, ControlLog
from omnidraft.ports import (
    Best,
    Canary,
    Champion,
    ControlState,
    Drift,
    FactorsOff,
    Forget,
    Outgoing,
    Pause,
    Restart,
    WorkerNews,
)
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.control_logs import control_in, control_over
from tests.silent_reader import SilentReader

CHAMPION = ("champion",)
REFUSED = "omnidraft_control_messages_refused_total"


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(partitions=3)


@pytest.fixture
def control(log: MemoryLog) -> ControlLog:
    return control_over(log)


def promote(control: ControlLog, *versions: int) -> None:
    for version in versions:
        control.put(CHAMPION, Champion(version=version))


def test_after_a_long_absence_only_the_last_champion_is_a_change(log, control):
    promote(control, *range(1, 10), 4)  # the memory log gives three messages a poll
    follower = control_over(log)
    state, changes = follower.poll(0)
    assert (state.champion, [each.value for each in changes]) == (Champion(version=4), [Champion(version=4)])
    assert follower.poll(0) == (state, ())
    promote(control, 10)
    state, changes = follower.poll(0)
    assert (state.champion.version, len(changes)) == (10, 1)


def test_every_kind_of_value_is_read_as_it_was_put(log, control):
    values = {
        ("champion",): Champion(version=3, digest="d"),
        ("canary",): Canary(version=4, share=0.1),
        ("pause",): Pause(),
        ("restart",): Restart(start="0:12 1:9", id="r"),
        ("drift", "a/b ü", "text"): Drift(level=0.5),
        ("best", "a/b ü"): Best(version=2, promotion="p"),
        ("forget", ""): Forget(id="o", until_ms=3),
        ("factors", "a"): FactorsOff(),
        ("worker", "w"): WorkerNews(address="http://w", release="1", serves={"big": None}),
    }
    for key, value in values.items():
        control.put(key, value, f"why {key[0]}")
    entries = control_over(log, hears_workers=True).read_whole().entries
    assert {key: (each.value, each.reason) for key, each in entries.items()} == {
        key: (value, f"why {key[0]}") for key, value in values.items()
    }


def test_what_is_removed_holds_no_more_and_says_why(log, control):
    control.put(("drift", "t", "text"), Drift(level=0.7))
    control.put(("pause",), Pause())
    control.put(("drift", "t", "text"), None, "it recovered")
    state, changes = control_over(log).poll(0)
    assert (state.is_drifting("t", "text"), state.is_paused, state.of(Drift)) == (False, True, {})
    assert [(each.kind, each.value, each.reason) for each in changes] == [
        ("pause", Pause(), None),
        ("drift", None, "it recovered"),
    ]


def test_pairs_on_one_topic_have_their_own_champions_and_the_tenants_in_common(log, control):
    other = control_over(log, target="huge")
    promote(control, 3)
    promote(other, 9)
    other.put(("forget", "t"), Forget(id="o", until_ms=1))
    states = [each.poll(0)[0] for each in (control, other, control_over(log, drafter="unheard of"))]
    assert [state.champion and state.champion.version for state in states] == [3, 9, None]
    assert [state.forget("t") for state in states] == [Forget(id="o", until_ms=1)] * 3


def test_a_champion_after_a_canary_ends_it(log, control):
    promote(control, 1)
    control.put(("canary",), Canary(version=2, share=0.1))
    assert control.poll(0)[0].canary == Canary(version=2, share=0.1)
    promote(control, 1)
    assert control.poll(0)[0].canary is None


def test_the_newest_value_holds_whatever_the_clocks_of_its_writers(log):
    fast, slow = control_over(log, clock=lambda: 2e9), control_over(log, clock=lambda: 1e9)
    promote(fast, 1)
    promote(slow, 2)
    promote(fast, 3)
    promote(slow, 4)
    assert control_over(log).read_whole().champion == Champion(version=4)


def test_an_old_message_that_is_written_again_is_refused(log, control):
    promote(control, 1, 2)
    old = MemoryReader(log, "control").poll(1, 0).messages[0]
    MemoryWriter(log, "control").append([Outgoing(old.key, old.value, old.headers)])
    metrics = CountingMetrics()
    for follower in (control, control_over(log, metrics)):
        assert follower.poll(0)[0].champion == Champion(version=2)
    assert metrics.value(REFUSED) == 1


def test_the_keeper_of_the_log_writes_again_what_others_wrote_over(log, control):
    """Compaction would leave the last message of the key alone."""
    keeper = control_over(log, is_keeper=True)
    promote(control, 1, 2)
    old = MemoryReader(log, "control").poll(1, 0).messages[0]
    for value in (old.value, b"rubbish"):
        keeper.poll(0)
        MemoryWriter(log, "control").append([Outgoing(old.key, value, partition=0)])
        keeper.poll(0)
        last = log.topic("control")[0][-1]
        assert json.loads(last.value)["value"] == {"version": 2}
    number = sum(map(len, log.topic("control")))
    keeper.poll(0)
    assert sum(map(len, log.topic("control"))) == number  # once


def test_the_keeper_writes_again_what_a_log_that_was_made_anew_has_lost(tmp_path):
    keeper = control_in(tmp_path / "log.db", is_keeper=True)
    promote(keeper, 7)
    keeper.poll(0)
    for path in tmp_path.glob("log.db*"):
        path.unlink()
    keeper.poll(0)
    assert control_in(tmp_path / "log.db").read_whole().champion == Champion(version=7)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"\xff", b"[]", b'{"key": "champion/big/org%2Fsmall", "sequence": 1, "at_ms": 1, "value": {}}'),
        b'{"key": "champion/big/org%2Fsmall", "sequence": -1, "at_ms": 1, "value": {"version": 2}}',
        b'{"key": "champion/huge/org%2Fsmall", "sequence": 99999999999999, "at_ms": 1, "value": {"version": 2}}',
    ],
)
def test_a_malformed_message_is_refused_and_counted(log, control, value):
    promote(control, 1)
    MemoryWriter(log, "control").append([Outgoing(b"champion/big/org%2Fsmall", value)])
    metrics = CountingMetrics()
    assert control_over(log, metrics).read_whole().champion == Champion(version=1)
    assert metrics.value(REFUSED) == 1


def test_an_sqlite_log_keeps_the_newest_of_each_key_and_what_was_replaced_of_late(tmp_path, monkeypatch):
    path = tmp_path / "log.db"
    control, follower = control_in(path), control_in(path)
    control.put(("pause",), Pause())
    promote(control, 1, 2, 3)
    follower.poll(0)

    def num_messages() -> int:
        with closing(SqliteReader(path, "control")) as reader:
            return len(reader.poll(100, 0).messages)

    assert num_messages() == 4
    monkeypatch.setattr("omnidraft.bus.sqlite_log.COMPACTION_LAG_S", -1.0)
    promote(control, 4)
    assert num_messages() == 2
    for each in (follower, control_in(path)):
        state, _ = each.poll(0)
        assert (state.is_paused, state.champion) == (True, Champion(version=4))


def test_of_two_values_with_one_sequence_the_later_in_the_log_holds(log):
    for version in (1, 2):
        stale = control_over(log, clock=lambda: 1e9)
        stale._read = lambda *args, **options: {}
        stale.put(CHAMPION, Champion(version=version))
    assert control_over(log).read_whole().champion == Champion(version=2)


def test_kinds_and_fields_of_a_later_version_do_no_harm(log, control):
    promote(control, 1)
    messages = [Outgoing(b"dance/big/org%2Fsmall", b"{}"), Outgoing(b"", b"{}")]
    wire = {"key": "pause/big/org%2Fsmall", "sequence": 9, "at_ms": 1, "value": {"until": "noon"}, "more": 1}
    messages.append(Outgoing(wire["key"].encode(), json.dumps(wire).encode()))
    MemoryWriter(log, "control").append(messages)
    metrics = CountingMetrics()
    state = control_over(log, metrics).read_whole()
    assert (state.champion.version, state.is_paused, metrics.value(REFUSED)) == (1, True, 0)


def test_what_has_not_its_kinds_fields_cannot_be_put(control):
    with pytest.raises(ValueError, match="share"):
        Canary(version=1, share=2)
    with pytest.raises(ValueError, match="a Champion, not a Pause"):
        control.put(CHAMPION, Pause())
    assert control.poll(0) == (ControlState(), ())


class FailsOnce(MemoryReader):
    """The log goes down after the first poll, for one poll."""

    num_polls = 0

    def poll(self, max_messages, timeout_s):
        self.num_polls += 1
        if self.num_polls == 2:
            raise BusError("down")
        return super().poll(max_messages, timeout_s)


def test_what_was_read_before_the_log_went_down_is_told_when_it_is_back(log, control):
    promote(control, *range(1, 7))
    follower = control_over(log, reader=lambda: FailsOnce(log, "control"))
    with pytest.raises(BusError):
        follower.poll(0)
    state, changes = follower.poll(0)
    assert (state.champion.version, len(changes)) == (6, 1)


def test_a_start_is_complete_at_the_end_of_the_log_and_not_at_the_first_silence(log, control):
    promote(control, *range(1, 7))
    follower = control_over(log, reader=lambda: SilentReader(log, "control", (1, 3)))
    for _ in range(2):
        with pytest.raises(BusError, match="gave nothing for"):
            follower.poll_all(MAX_SILENCE_S / 2 + 1)  # a message ends the silence
        promote(control, 7)
    assert follower.poll_all(0)[0].champion == Champion(version=7)


def test_a_start_goes_on_without_messages_that_the_log_does_not_give_for_long(log, control, caplog):
    promote(control, *range(1, 7))
    follower = control_over(log, reader=lambda: SilentReader(log, "control", range(1, 99)))
    for _ in range(3):
        with pytest.raises(BusError, match="gave nothing for"):
            follower.poll_all(MAX_SILENCE_S / 4)
    assert follower.poll_all(MAX_SILENCE_S / 4)[0].champion == Champion(version=3)
    assert "these messages count as unreadable" in caplog.text


def test_a_start_waits_for_no_message_that_retention_deleted(tmp_path):
    path = tmp_path / "log.db"
    writer = SqliteWriter(path, "control")
    writer.append([Outgoing(b"champion/big/org%2Fsmall", b"{}")])
    delete_before(path, "control", {0: 1})
    follower = control_over(MemoryLog(1), reader=lambda: SqliteReader(path, "control"))
    assert follower.poll_all(0) == (ControlState(), ())


@pytest.mark.parametrize(("silent", "champion"), [((0, 1, 3), 6), (range(1, 99), 3)])
def test_one_look_at_a_slow_log_misses_nothing_that_it_gives(log, control, silent, champion):
    promote(control, *range(1, 7))
    follower = control_over(log, reader=lambda: SilentReader(log, "control", silent))
    assert follower.read_whole(MAX_SILENCE_S / 4).champion == Champion(version=champion)


def test_one_look_at_a_log_that_goes_away_says_so(log, control):
    class Gone(SilentReader):
        num_asked = 0

        def end_offsets(self):
            self.num_asked += 1
            if self.num_asked > 3:
                raise BusError("no broker answers")
            return super().end_offsets()

    promote(control, 1)
    follower = control_over(log, reader=lambda: Gone(log, "control", range(99)))
    with pytest.raises(BusError, match="no broker answers"):
        follower.read_whole(MAX_SILENCE_S / 9)
