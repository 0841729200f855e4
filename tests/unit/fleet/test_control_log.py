"""The newest announcement is told once, and nothing on the topic can stop its readers."""

import pytest

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter, delete_before
from omnidraft.errors import BusError
from omnidraft.fleet import control_log
from omnidraft.fleet.control_follower import MAX_SILENCE_S, LogControlFollower
from omnidraft.ports import Announcement, Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.silent_reader import SilentReader


@pytest.fixture
def log():
    return MemoryLog(partitions=3)


@pytest.fixture
def writer(log):
    return MemoryWriter(log, "control")


@pytest.fixture
def metrics():
    return CountingMetrics()


def follow(log, metrics, kinds=("champion",), **pair):
    return LogControlFollower(MemoryReader(log, "control"), metrics, kinds=kinds, **pair)


def test_after_a_long_absence_only_the_last_champion_is_told(log, writer, metrics):
    for version in range(1, 10):  # the memory log gives three messages a poll
        control_log.publish_announcement(writer, "champion", version)
    control_log.publish_announcement(writer, "champion", 4)  # a rollback
    follower = follow(log, metrics)
    assert follower.poll(0) == (Announcement(9, "champion", 4),)
    assert follower.poll(0) == ()
    control_log.publish_announcement(writer, "champion", 10)
    assert follower.poll(0) == (Announcement(10, "champion", 10),)


def test_each_follower_hears_its_kinds_only(log, writer, metrics):
    control_log.publish_announcement(writer, "pause")
    control_log.publish_announcement(writer, "champion", 1)
    control_log.publish_announcement(writer, "resume")
    learner, worker = follow(log, metrics, ("pause", "resume")), follow(log, metrics)
    assert learner.poll(0) == (Announcement(2, "resume"),)
    assert worker.poll(0) == (Announcement(1, "champion", 1),)


def test_pairs_on_one_topic_hear_their_own_champion_only(log, writer, metrics):
    control_log.publish_announcement(writer, "champion", 3, target="big", drafter="small")
    control_log.publish_announcement(writer, "champion", 9, target="huge", drafter="small")
    control_log.publish_announcement(writer, "champion", 5, target="big", drafter="other")
    followers = [follow(log, metrics, target=target, drafter="small") for target in ("big", "huge", "unheard of")]
    heard = [follower.poll(0) for follower in followers]
    assert heard == [
        (Announcement(0, "champion", 3, "big", "small"),),
        (Announcement(1, "champion", 9, "huge", "small"),),
        (),
    ]
    assert follow(log, metrics).poll(0) == (Announcement(2, "champion", 5, "big", "other"),)


def test_a_message_that_names_no_pair_is_for_all_but_those_who_serve_several(log, writer, metrics):
    control_log.publish_announcement(writer, "champion", 2, target="big", drafter="small")
    control_log.publish_announcement(writer, "champion", 3)
    alone, among = (
        follow(log, metrics, target="big", drafter="small", must_be_named=several) for several in (False, True)
    )
    assert alone.poll(0) == (Announcement(1, "champion", 3),)
    assert among.poll(0) == (Announcement(0, "champion", 2, "big", "small"),)


def test_learning_is_paused_for_one_target_or_for_all(log, writer, metrics):
    kinds = ("pause", "resume")
    big, huge = (follow(log, metrics, kinds, target=target, drafter="small") for target in ("big", "huge"))
    control_log.publish_announcement(writer, "pause")
    assert [told.kind for told in (*big.poll(0), *huge.poll(0))] == ["pause", "pause"]
    control_log.publish_announcement(writer, "resume", target="huge")
    assert (big.poll(0), [told.kind for told in huge.poll(0)]) == ((), ["resume"])


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"\xff", b"[]", b'{"kind": "champion"}', b'{"kind": "dance"}', b'{"kind": "pause", "version": 1}'),
        *(b'{"kind": "canary", "version": 1}', b'{"kind": "canary", "version": 1, "share": 2}', b'{"kind": "drift"}'),
        b'{"kind": "drift", "tenant": "a"}',
    ],
)
def test_a_malformed_message_is_skipped_and_counted(log, writer, metrics, value):
    control_log.publish_announcement(writer, "champion", 1)
    writer.append([Outgoing(control_log.KEY, value)])
    assert follow(log, metrics).poll(0) == (Announcement(0, "champion", 1),)
    assert metrics.value("omnidraft_control_messages_skipped_total") == 1


def test_a_key_of_a_later_controller_does_no_harm(log, writer, metrics):
    writer.append([Outgoing(control_log.KEY, b'{"kind": "champion", "version": 2, "canary": 0.1}')])
    assert follow(log, metrics).poll(0) == (Announcement(0, "champion", 2),)


class FailsOnce(MemoryReader):
    """The log goes down after the first poll, for one poll."""

    num_polls = 0

    def poll(self, max_messages, timeout_s):
        self.num_polls += 1
        if self.num_polls == 2:
            raise BusError("down")
        return super().poll(max_messages, timeout_s)


def test_what_was_read_before_the_log_went_down_is_told_when_it_is_back(log, writer, metrics):
    for version in (1, 2, 3):
        control_log.publish_announcement(writer, "champion", version)
    for _ in range(3):
        control_log.publish_announcement(writer, "pause")
    follower = LogControlFollower(FailsOnce(log, "control"), metrics, kinds=("champion",))
    with pytest.raises(BusError):
        follower.poll(0)
    assert follower.poll(0) == (Announcement(2, "champion", 3),)


def test_a_start_is_complete_at_the_end_of_the_log_and_not_at_the_first_silence(log, writer, metrics):
    for version in range(1, 7):
        control_log.publish_announcement(writer, "champion", version)
    follower = LogControlFollower(SilentReader(log, "control", (1, 3)), metrics, kinds=("champion",))
    for _ in range(2):
        with pytest.raises(BusError, match="gave nothing for"):
            follower.poll_all(MAX_SILENCE_S / 2 + 1)  # a message ends the silence
        control_log.publish_announcement(writer, "champion", 7)
    assert follower.poll_all(0) == (Announcement(7, "champion", 7),)


def test_a_start_goes_on_without_messages_that_the_log_does_not_give_for_long(log, writer, metrics, caplog):
    for version in range(1, 7):
        control_log.publish_announcement(writer, "champion", version)
    follower = LogControlFollower(SilentReader(log, "control", range(1, 99)), metrics, kinds=("champion",))
    for _ in range(3):
        with pytest.raises(BusError, match="gave nothing for"):
            follower.poll_all(MAX_SILENCE_S / 4)
    assert follower.poll_all(MAX_SILENCE_S / 4) == (Announcement(2, "champion", 3),)
    assert "these messages count as unreadable" in caplog.text


def test_a_start_waits_for_no_message_that_retention_deleted(tmp_path, metrics):
    path = tmp_path / "log.db"
    control_log.publish_announcement(SqliteWriter(path, "control"), "champion", 1)
    delete_before(path, "control", {0: 1})
    follower = LogControlFollower(SqliteReader(path, "control"), metrics, kinds=("champion",))
    assert follower.poll_all(0) == ()


def test_one_look_at_a_slow_log_misses_nothing(log, writer, metrics):
    for version in range(1, 7):
        control_log.publish_announcement(writer, "champion", version)
    follower = LogControlFollower(SilentReader(log, "control", (0, 1, 3)), metrics, kinds=("champion",))
    assert follower.read_whole(MAX_SILENCE_S / 4) == (Announcement(5, "champion", 6),)


def test_one_look_at_a_log_that_gives_nothing_more_ends(log, writer, metrics, caplog):
    for version in range(1, 7):
        control_log.publish_announcement(writer, "champion", version)
    follower = LogControlFollower(SilentReader(log, "control", range(1, 99)), metrics, kinds=("champion",))
    assert follower.read_whole(MAX_SILENCE_S / 4) == (Announcement(2, "champion", 3),)
    assert "these messages count as unreadable" in caplog.text


def test_one_look_at_a_log_that_goes_away_says_so(log, writer, metrics):
    class Gone(SilentReader):
        num_asked = 0

        def end_offsets(self):
            self.num_asked += 1
            if self.num_asked > 3:
                raise BusError("no broker answers")
            return super().end_offsets()

    control_log.publish_announcement(writer, "champion", 1)
    follower = LogControlFollower(Gone(log, "control", range(99)), metrics, kinds=("champion",))
    with pytest.raises(BusError, match="no broker answers"):
        follower.read_whole(MAX_SILENCE_S / 9)


def test_a_champion_after_a_canary_supersedes_it_and_drifts_of_tenants_hold_side_by_side(log, writer, metrics):
    control_log.publish_announcement(writer, "champion", 1)
    control_log.publish_announcement(writer, "canary", 2, share=0.1)
    control_log.publish_announcement(writer, "drift", tenant="a", work="text", reason="fell")
    control_log.publish_announcement(writer, "drift", tenant="b", work="text")
    control_log.publish_announcement(writer, "drift_over", tenant="b", work="text")
    kinds = ("champion", "canary", "drift", "drift_over")
    follower = follow(log, metrics, kinds)
    assert follower.poll(0) == (
        Announcement(1, "canary", 2, share=0.1),
        Announcement(2, "drift", tenant="a", work="text", reason="fell"),
        Announcement(4, "drift_over", tenant="b", work="text"),
    )
    control_log.publish_announcement(writer, "champion", 1)
    assert [told.kind for told in follow(log, metrics, kinds).poll(0)] == ["drift", "drift_over", "champion"]


def test_drifts_of_one_tenants_kinds_of_requests_hold_side_by_side(log, writer, metrics):
    for work in ("text", "constrained"):
        control_log.publish_announcement(writer, "drift", tenant="a", work=work)
    control_log.publish_announcement(writer, "drift_over", tenant="a", work="text")
    assert follow(log, metrics, ("drift", "drift_over")).poll(0) == (
        Announcement(1, "drift", tenant="a", work="constrained"),
        Announcement(2, "drift_over", tenant="a", work="text"),
    )


@pytest.mark.parametrize("fields", [{"work": "text"}, {"level": 0.7}], ids=["kind of request", "level"])
def test_only_drifts_have_a_kind_of_request_and_a_level(writer, fields):
    with pytest.raises(ValueError, match="have a kind of request and may have a level"):
        control_log.publish_announcement(writer, "factors_off", tenant="a", **fields)


def test_a_message_that_lacks_what_its_kind_needs_is_not_written(log, writer, metrics):
    with pytest.raises(ValueError, match="a canary has a share"):
        control_log.publish_announcement(writer, "canary", 2)
    assert follow(log, metrics).poll(0) == ()


def test_an_order_to_forget_reaches_every_pair_and_each_tenants_newest_one_holds(log, writer, metrics):
    for tenant, until_ms in (("a", 1), ("b", 2), ("a", 3)):
        control_log.publish_announcement(
            writer, "forget", tenant=tenant, forget_id=f"{tenant}{until_ms}", until_ms=until_ms
        )
    follower = follow(log, metrics, ("forget",), target="big", drafter="small", must_be_named=True)
    orders = follower.poll(0)
    assert [(each.tenant, each.forget_id, each.until_ms) for each in orders] == [("b", "b2", 2), ("a", "a3", 3)]
    with pytest.raises(ValueError, match="a name and a time"):
        control_log.publish_announcement(writer, "forget", tenant="a")
