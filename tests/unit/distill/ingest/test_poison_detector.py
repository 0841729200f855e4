"""The poison detector: a process counts the crashes before it, each a journal with records still under way."""

from contextlib import suppress
from pathlib import Path

import pytest

from omnidraft.distill.ingest.poison_detector import PoisonDetector
from tests.distiller_runs import Killed

STEP = [(0, 3), (1, 5)]
OTHER = [(0, 4), (1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "trying.json"


def die(path: Path, places, *, times: int, alone: bool = False) -> None:
    for _ in range(times):
        with suppress(Killed), PoisonDetector(path, tries=2).trying(places, alone=alone):
            raise Killed


def survive(detector: PoisonDetector, places, *, alone: bool = False) -> None:
    with detector.trying(places, alone=alone):
        pass


def test_a_step_that_ends_leaves_no_file(path: Path) -> None:
    with PoisonDetector(path, tries=2).trying(STEP):
        assert path.exists()
    assert not path.exists()


def test_after_so_many_deaths_the_records_of_a_step_are_suspects(path: Path) -> None:
    die(path, STEP, times=1)
    assert PoisonDetector(path, tries=2).suspects(STEP) == []
    die(path, STEP, times=1)
    detector = PoisonDetector(path, tries=2)
    assert detector.suspects([*OTHER, *STEP]) == STEP
    assert detector.poison == frozenset()


def test_who_dies_alone_as_often_is_poison_and_the_others_are_tried_again(path: Path) -> None:
    die(path, STEP, times=2)
    for _ in range(2):
        survive(PoisonDetector(path, tries=2), STEP[:1], alone=True)
        die(path, STEP[1:], times=1, alone=True)
    detector = PoisonDetector(path, tries=2)
    assert detector.poison == {STEP[1]}
    survive(detector, STEP[:1])
    assert PoisonDetector(path, tries=2).suspects(STEP) == STEP[1:]


def test_records_that_kill_only_together_are_poison_together(path: Path) -> None:
    die(path, STEP, times=2)
    for _ in range(2):
        for place in STEP:
            survive(PoisonDetector(path, tries=2), [place], alone=True)
        die(path, STEP, times=1)
    assert PoisonDetector(path, tries=2).poison == frozenset(STEP)


def test_a_step_that_ends_at_last_is_forgotten_with_its_deaths(path: Path) -> None:
    die(path, STEP, times=3)
    survive(PoisonDetector(path, tries=2), STEP)
    assert not path.exists()


def test_poison_is_known_until_a_snapshot_is_past_it(path: Path) -> None:
    die(path, STEP[1:], times=4)
    detector = PoisonDetector(path, tries=2)
    survive(detector, OTHER)
    detector.published({0: 9, 1: 5})
    assert PoisonDetector(path, tries=2).poison == {STEP[1]}
    detector.published({0: 9, 1: 6})
    assert not path.exists()
    assert detector.poison == {STEP[1]}  # the batcher may hold it still


def test_a_death_while_the_step_waits_counts_for_nothing_and_one_after_that_does(path: Path) -> None:
    detector = PoisonDetector(path, tries=1)
    with detector.trying(STEP):
        with detector.suspended():
            assert not path.exists()
            assert PoisonDetector(path, tries=1).suspects(STEP) == []
        assert PoisonDetector(path, tries=1).suspects(STEP) == STEP


def test_once_suspended_the_journal_accuses_nobody_any_more(path: Path) -> None:
    detector = PoisonDetector(path, tries=2)
    with detector.trying(STEP):
        detector.suspend()
        assert not path.exists()
        with detector.suspended():
            pass
    with detector.trying(OTHER):
        assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"crashes": 3}', b"\xff"])
def test_a_journal_that_cannot_be_read_counts_anew(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    detector = PoisonDetector(path, tries=2)
    assert detector.poison == frozenset()
    survive(detector, STEP)
    assert not path.exists()


def test_with_no_tries_nothing_is_written(path: Path) -> None:
    detector = PoisonDetector(path, tries=0)
    with detector.trying(STEP):
        assert not path.parent.exists()
    assert detector.suspects(STEP) == []
