"""The crash journal: a process counts the crashes before it, each a journal with records still under way."""

from pathlib import Path

import pytest

from omnidraft.distill.ingest.crash_journal import CrashJournal

STEP = [(0, 3), (1, 5)]
OTHER = [(0, 4), (1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "trying.json"


def die(path: Path, places, *, times: int, alone: bool = False) -> None:
    for _ in range(times):
        CrashJournal(path, tries=2).start(places, alone=alone)


def test_a_step_that_ends_leaves_no_file(path: Path) -> None:
    journal = CrashJournal(path, tries=2)
    journal.start(STEP)
    assert path.exists()
    journal.finish()
    assert not path.exists()


def test_after_so_many_deaths_the_records_of_a_step_are_suspects(path: Path) -> None:
    die(path, STEP, times=1)
    assert CrashJournal(path, tries=2).suspects(STEP) == []
    CrashJournal(path, tries=2).start(STEP)
    journal = CrashJournal(path, tries=2)
    assert journal.suspects([*OTHER, *STEP]) == STEP
    assert journal.poison == frozenset()


def test_who_dies_alone_as_often_is_poison_and_the_others_are_tried_again(path: Path) -> None:
    die(path, STEP, times=2)
    journal = CrashJournal(path, tries=2)
    journal.start(STEP[:1], alone=True)
    journal.finish()
    assert journal.suspects(STEP) == STEP[1:]
    die(path, STEP[1:], times=2, alone=True)
    journal = CrashJournal(path, tries=2)
    assert journal.poison == {STEP[1]}
    assert journal.suspects(STEP[:1]) == []


def test_records_that_kill_only_together_are_poison_together(path: Path) -> None:
    die(path, STEP, times=2)
    journal = CrashJournal(path, tries=2)
    for place in STEP:
        journal.start([place], alone=True)
        journal.finish()
    assert journal.suspects(STEP) == []
    die(path, STEP, times=2)
    assert CrashJournal(path, tries=2).poison == frozenset(STEP)


def test_a_step_that_ends_at_last_is_forgotten_with_its_deaths(path: Path) -> None:
    die(path, STEP, times=3)
    journal = CrashJournal(path, tries=2)
    journal.start(STEP)
    journal.finish()
    assert not path.exists()


def test_poison_is_known_until_a_snapshot_is_past_it(path: Path) -> None:
    die(path, STEP[1:], times=2, alone=True)
    journal = CrashJournal(path, tries=2)
    journal.start(OTHER)
    journal.finish()
    journal.published({0: 9, 1: 5})
    assert CrashJournal(path, tries=2).poison == {STEP[1]}
    journal.published({0: 9, 1: 6})
    assert not path.exists()
    assert journal.poison == {STEP[1]}  # the batcher may hold it still


def test_a_death_while_the_step_waits_counts_for_nothing_and_one_after_that_does(path: Path) -> None:
    journal = CrashJournal(path, tries=1)
    journal.start(STEP)
    with journal.suspended():
        assert not path.exists()
        assert CrashJournal(path, tries=1).suspects(STEP) == []
    assert CrashJournal(path, tries=1).suspects(STEP) == STEP


def test_once_suspended_the_journal_accuses_nobody_any_more(path: Path) -> None:
    journal = CrashJournal(path, tries=2)
    journal.start(STEP)
    journal.suspend()
    assert not path.exists()
    with journal.suspended():
        pass
    journal.start(OTHER)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"together": 3}', b"\xff"])
def test_a_journal_that_cannot_be_read_counts_anew(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    journal = CrashJournal(path, tries=2)
    assert journal.poison == frozenset()
    journal.start(STEP)
    journal.finish()
    assert not path.exists()


def test_with_no_tries_nothing_is_written(path: Path) -> None:
    journal = CrashJournal(path, tries=0)
    journal.start(STEP)
    assert not path.parent.exists()
    assert journal.suspects(STEP) == []
