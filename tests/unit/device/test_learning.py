"""What stops learning is told to whoever asks, never to who asks the model; the home is free afterwards."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from omnidraft import throttle
from omnidraft.config import LearnerSettings
from omnidraft.device.home import DeviceHome
from omnidraft.device.learning import IdleLearning, LearningParts
from omnidraft.distill.control import Status
from omnidraft.distill.ingest.poison_detector import PoisonDetector
from omnidraft.errors import ConfigError, OmnidraftError, RegistryError

Stop = Callable[[], bool]


class Distiller:
    """Runs this function as a distiller runs its rounds."""

    def __init__(
        self,
        rounds: Callable[[Stop, Callable[[Status], None], Callable[[], None]], None],
        detector: PoisonDetector | None = None,
    ) -> None:
        self._rounds, self._detector = rounds, detector or PoisonDetector(Path(), tries=0)

    def __call__(self, *, progress: Callable[[Status], None], on_empty_poll: Callable[[], None]) -> Any:
        return SimpleNamespace(
            run=lambda stop: self._rounds(stop, progress, on_empty_poll), poison_detector=self._detector
        )


@contextmanager
def learning(home: Path, distiller: Distiller, judge: Callable[[], None] = lambda: None) -> Iterator[IdleLearning]:
    parts: Any = {
        "home": DeviceHome(home),
        "producer": SimpleNamespace(num_waiting=0, problem=None, close=lambda timeout_s: 0),
        "slot": SimpleNamespace(current=SimpleNamespace(version=None), drop_previous=lambda: None),
        "updater": SimpleNamespace(step=lambda stop: None),
        "controller": SimpleNamespace(step=judge, close=lambda: None),
        "tidier": SimpleNamespace(tidy=lambda: None),
        "make_distiller": distiller,
        "settings": LearnerSettings(),
        "idle_s": 0.0,
    }
    made = IdleLearning(LearningParts(**parts))
    try:
        yield made
    finally:
        made.close()
        DeviceHome(home).close()  # it is free


def until_stopped(stop: Stop, _: Callable[[Status], None], on_empty_poll: Callable[[], None]) -> None:
    while not stop():
        on_empty_poll()


class EndlessStep:
    """A step of one record, noted in a journal, in pieces until it is closed."""

    def __init__(self, path: Path) -> None:
        self._detector, self._path = PoisonDetector(path, tries=1), path
        self._begun, self._is_over = Event(), Event()

    def distiller(self) -> Distiller:
        return Distiller(self._run, self._detector)

    def wait_until_accused(self, is_accused: bool) -> None:
        """Return when the next process would, or would not, count a crash over the record."""
        assert self._begun.wait(60.0)
        deadline_s = time.monotonic() + 60.0
        while self._path.exists() is not is_accused:
            assert time.monotonic() < deadline_s, f"the journal does not say that it is {is_accused}"
            time.sleep(0.01)

    def close(self) -> None:
        self._is_over.set()

    def _run(self, *_: object) -> None:
        with self._detector.trying([(0, 3)]):
            self._begun.set()
            while not self._is_over.is_set():
                throttle.rest()
                time.sleep(0.001)


def test_with_nothing_to_learn_nobody_waits(tmp_path: Path) -> None:
    with learning(tmp_path, Distiller(until_stopped)) as idle:
        assert idle.wait(60.0)
        with idle.request():
            assert not idle.wait(0.1), "while a request runs, nothing is learned"


def test_an_error_that_ends_learning_is_told_and_requests_go_on(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("of another rank")

    with learning(tmp_path, Distiller(fail)) as idle:
        with pytest.raises(OmnidraftError, match="of another rank"):
            idle.wait(60.0)
        with idle.request():
            assert "of another rank" in str(idle.problem)


def test_what_somebody_has_to_decide_is_told(tmp_path: Path) -> None:
    def stand_still(stop: Stop, progress: Callable[[Status], None], _: Callable[[], None]) -> None:
        while not stop():
            progress(Status(waits_for="the log is another one"))

    with learning(tmp_path, Distiller(stand_still)) as idle, pytest.raises(OmnidraftError, match="another one"):
        idle.wait(60.0)


def test_a_snapshot_is_judged_once_and_a_failed_judgement_ends_nothing(tmp_path: Path) -> None:
    judged: list[int] = []

    def judge() -> None:
        judged.append(1)
        raise RegistryError("no space")

    def publish(stop: Stop, progress: Callable[[Status], None], on_empty_poll: Callable[[], None]) -> None:
        for version in (None, 1, 1, 2):
            progress(Status(version=version))
        until_stopped(stop, progress, on_empty_poll)

    with learning(tmp_path, Distiller(publish), judge) as idle:
        assert idle.wait(60.0)
    assert judged == [1, 1]


def test_a_closed_learning_is_closed_once_and_waits_for_nobody(tmp_path: Path) -> None:
    with learning(tmp_path, Distiller(until_stopped)) as idle, idle.request():
        idle.close()
        idle.close()
        assert not idle.wait(60.0)


def test_a_step_that_waits_for_a_request_is_not_accused_of_the_end_of_its_process(tmp_path: Path) -> None:
    step = EndlessStep(tmp_path / "trying.json")
    with learning(tmp_path / "home", step.distiller()) as idle, closing(step):
        for _ in range(2):
            step.wait_until_accused(True)
            with idle.request():
                step.wait_until_accused(False)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_close_that_is_interrupted_while_records_are_written_ends_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(tmp_path, Distiller(until_stopped)) as idle:
        with monkeypatch.context() as patch:
            patch.setattr(idle._parts.producer, "close", interrupt)
            with pytest.raises(KeyboardInterrupt):
                idle.close()
        assert idle._closing.is_set()
        assert not idle.wait(60.0)


def test_an_interrupted_close_is_finished_by_the_next_one_and_accuses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, step = tmp_path / "home", EndlessStep(tmp_path / "trying.json")
    with learning(home, step.distiller()) as idle, closing(step):
        step.wait_until_accused(True)
        with monkeypatch.context() as patch:
            patch.setattr(idle._thread, "join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                idle.close()
        step.wait_until_accused(False)
        with pytest.raises(ConfigError, match="learns in"):
            DeviceHome(home)
        step.close()
        idle.close()
        assert not idle._thread.is_alive()
        DeviceHome(home).close()
