"""The status of a fleet, of a log in memory."""

import pytest
from omnidraft.fleet.control_follower import MAX_SILENCE_S

from omnidraft.errors import RegistryError
from omnidraft.fleet.overview import POLL_S, DeadLetters, OverviewSources, overview
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryWriter
from tests.silent_reader import SilentReader
from tests.tiny_engine import tiny_settings


def no_registry(target):
    raise RegistryError("no registry")


@pytest.fixture
def look(tmp_path):
    """Takes the status with five dead letters in two partitions, some polls of which bring nothing."""
    settings, log = tiny_settings((tmp_path, tmp_path)), MemoryLog(partitions=2)
    letters = [Outgoing(b"k", b"", {"reason": b"unreadable"}, partition=number % 2) for number in range(5)]
    MemoryWriter(log, settings.log.dead_letters_topic).append(letters)

    def take(silent_polls):
        sources = OverviewSources(
            no_registry,
            lambda: (settings.log.dead_letters_topic,),
            lambda topic: SilentReader(log, topic, silent_polls),
            worker=None,
        )
        return overview(sources, settings, CountingMetrics(), (), 0)

    return take


def test_a_log_that_is_silent_for_a_while_hides_no_dead_letters(look):
    assert look((0, 2, 3)).dead_letters == DeadLetters(5, {"unreadable": 5})


def test_dead_letters_that_a_log_does_not_give_are_unknown_and_a_problem(look):
    status = look(range(1, 99))
    assert status.dead_letters is None
    assert [each for each in status.problems if each.startswith("dead letters: ")] == [
        f"dead letters: the log gave nothing for {MAX_SILENCE_S:.0f} s before its ends"
    ]
    assert look(range(1, int(MAX_SILENCE_S / POLL_S))).dead_letters == DeadLetters(5, {"unreadable": 5})
