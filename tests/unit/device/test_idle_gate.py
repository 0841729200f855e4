"""Requests pass at once; learning goes on between them only."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread

from omnidraft.device.learning import IdleGate


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def waiting(gate: IdleGate, block: Callable[[], AbstractContextManager[None]] = nullcontext) -> tuple[Thread, Event]:
    """A thread at the gate, and the event that it passed."""
    passed = Event()

    def wait() -> None:
        gate.wait(block)
        passed.set()

    thread = Thread(target=wait)
    thread.start()
    return thread, passed


def test_learning_waits_while_any_request_runs_and_goes_on_after_the_last() -> None:
    gate = IdleGate(0.0)
    gate.wait()  # idle: at once
    with gate.request():
        with gate.request():
            thread, passed = waiting(gate)
            assert not passed.wait(0.05)
        assert not passed.wait(0.05)
    thread.join()
    assert passed.is_set()


def test_only_who_has_to_wait_does_so_in_the_block_and_no_request_waits_for_that() -> None:
    gate, entered, may_enter, steps = IdleGate(0.0), Event(), Event(), list[str]()

    @contextmanager
    def block() -> Iterator[None]:
        entered.set()
        steps.append("waits" if may_enter.wait(5.0) else "holds a request up")
        yield
        steps.append("goes on")

    gate.wait(block)
    assert not entered.is_set()
    with gate.request():
        thread, passed = waiting(gate, block)
        entered.wait()
        with gate.request():  # while the block is entered
            may_enter.set()
        assert not passed.wait(0.05)
    thread.join()
    assert steps == ["waits", "goes on"]


def test_learning_waits_for_the_quiet_time_too() -> None:
    clock = Clock()
    gate = IdleGate(60.0, clock)
    thread, passed = waiting(gate)
    assert not passed.wait(0.05)
    clock.now_s = 61.0
    with gate.request():
        pass  # begins the quiet time anew
    assert not passed.wait(0.05)
    gate.open()
    thread.join()


def test_an_error_in_a_request_lets_learning_go_on() -> None:
    gate = IdleGate(0.0)
    try:
        with gate.request():
            raise ValueError
    except ValueError:
        gate.wait()
