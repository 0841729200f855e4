"""The status of a fleet, of a log in memory."""

import pytest

from omnidraft.errors import RegistryError
from omnidraft.fleet.control_log import MAX_SILENCE_S
from omnidraft.fleet.overview import POLL_S, DeadLetters, OverviewSources, overview
from omnidraft.fleet.workers import GONE_S, SILENT_S, ServedTargetStatus, WorkerStatus
from omnidraft.ports import Champion, Outgoing, WorkerNews
from omnidraft.testing.memory_log import MemoryLog, MemoryWriter
from tests.control_logs import control_over
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
            worker=WorkerStatus,
            control=lambda target: control_over(log, target=target),
        )
        return overview(sources, settings, (), 0, guess="http://here")

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


class Fleet:
    """A control log, its workers by URL and what each serves, and the status of all."""

    def __init__(self, folder) -> None:
        self.settings, self.log = tiny_settings((folder, folder)), MemoryLog()
        self.target, self.versions, self.asked = self.settings.models.target, {}, []
        self.now_s = 1e9

    def announce(self, name, address, version):
        control = control_over(self.log, clock=lambda: self.now_s)
        control.put(("worker", name), WorkerNews(address=address, release="1", serves={self.target: version}))

    def promote(self, version):
        models = self.settings.models
        control = control_over(self.log, target=models.target, drafter=models.followed_drafter)
        control.put(("champion",), Champion(version=version))

    def ask(self, url):
        self.asked.append(url)
        served = ServedTargetStatus(self.target, self.versions[url], 0, 0, None, None)
        return WorkerStatus(url, None, is_alive=True, is_ready=True, served=(served,))

    def problems(self, *workers):
        models = self.settings.models
        sources = OverviewSources(
            no_registry,
            lambda: (self.settings.log.control_topic,),
            lambda topic: None,
            worker=self.ask,
            control=lambda target: control_over(
                self.log, target=target, drafter=models.followed_drafter, hears_workers=True
            ),
        )
        status = overview(sources, self.settings, workers, int(self.now_s * 1000), guess="http://here")
        return [each for each in status.problems if each.startswith("worker")]


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path)


def test_workers_that_announced_themselves_are_asked_without_being_named(fleet):
    fleet.announce("a", "http://a", 1)
    fleet.announce("b", "http://b", None)
    fleet.versions = {"http://a": 2, "http://b": None, "http://c": 2}
    fleet.promote(2)
    base = f"worker http://b: serves the base drafter of {fleet.target}, the champion is 2"
    assert (fleet.problems(), fleet.asked) == ([base], ["http://a", "http://b"])
    assert (fleet.problems("http://c"), fleet.asked[2:]) == ([], ["http://c"])


def test_a_replica_without_an_address_is_taken_at_its_word(fleet):
    fleet.announce("replica", None, 1)
    fleet.promote(2)
    line = f"worker replica: serves snapshot 1 of {fleet.target}, the champion is 2"
    assert (fleet.problems(), fleet.asked) == ([line], [])


def test_a_worker_that_went_silent_is_a_problem_until_nobody_misses_it(fleet):
    fleet.announce("a", "http://a", 1)
    fleet.announce("b", "http://b", 1)
    control_over(fleet.log).put(("worker", "b"), None)
    fleet.now_s += SILENT_S + 1
    assert fleet.problems() == [f"worker http://a: was last heard of {SILENT_S + 1:.0f} s ago"]
    fleet.versions = {"http://here": None}
    fleet.now_s += GONE_S
    assert (fleet.problems(), fleet.asked) == ([], ["http://here"])
