"""Learning in the idle moments of a process that answers requests: distiller, controller and updater in one thread.

The thread runs the services' own code over a log and a registry in a folder, so the order of effects is theirs: what
the log acknowledged is learned once, whatever kills the process, and a snapshot serves if held-out requests speak for
it. Between two pieces of any of that the thread waits at the gate while requests run.

A request passes the gate at once, whatever learning does. Learning asks it between two pieces of its work, so it runs
beside a request until its piece ends, and no longer.
"""

import atexit
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event
from typing import Protocol

from omnidraft import throttle
from omnidraft.config import LearnerSettings
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.snapshot.slot import SnapshotSlot
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.device.home import DeviceHome
from omnidraft.distill.control import Status
from omnidraft.distill.distiller import Distiller
from omnidraft.distill.ingest.poison_detector import PoisonDetector
from omnidraft.errors import BusError, OmnidraftError, SnapshotError
from omnidraft.fleet.controller import Controller
from omnidraft.models.loading import openmp_threads
from omnidraft.ports import Offsets, Registry
from omnidraft.registry.retention import superseded
from omnidraft.snapshots.bundle import ALL_PARTS
from omnidraft.threads import SupervisedThread, first_problem

logger = logging.getLogger(__name__)


IDLE_S = 1.0
"""The time without requests after which learning goes on: the short pauses between requests are left alone."""


class IdleGate:
    """Any thread may make requests; one thread learns."""

    def __init__(self, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`idle_s` is the time without requests after which learning goes on."""
        self._idle_s, self._clock = idle_s, clock
        self._condition = Condition()
        self._num_requests = 0
        self._idle_from_s = clock() + idle_s
        self._is_open = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep learning away inside the block."""
        with self._condition:
            self._num_requests += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_requests -= 1
                self._idle_from_s = self._clock() + self._idle_s
                self._condition.notify_all()

    def wait(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Return when learning may go on: no request runs, and none has for `idle_s`; at once after `open`.

        Args:
            waiting: returns the block to wait in where that is not at once. No request waits for it.
        """
        with self._condition:
            if self._may_learn():
                return
        with waiting(), self._condition:
            while not self._may_learn():
                self._condition.wait(None if self._num_requests else self._idle_from_s - self._clock())

    def open(self) -> None:
        """Let learning go on from now on, whatever runs: it is to end what it has begun."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def _may_learn(self) -> bool:
        return self._is_open or (not self._num_requests and self._clock() >= self._idle_from_s)


FLUSH_S = 10.0
"""The time that `close` gives the log to acknowledge the last records."""
POLL_S = 0.02


class MakeDistiller(Protocol):
    """Loads the learner and returns its distiller."""

    def __call__(self, *, progress: Callable[[Status], None], on_empty_poll: Callable[[], None]) -> Distiller:
        """See Distiller for the two functions."""


@dataclass(frozen=True, slots=True)
class LearningParts:
    """The parts that learn. `controller`, `updater`, `tidier` and the distiller belong to the learning thread."""

    home: DeviceHome
    producer: TraceProducer
    slot: SnapshotSlot
    updater: SnapshotUpdater
    controller: Controller
    tidier: "Tidier"
    make_distiller: MakeDistiller
    settings: LearnerSettings
    idle_s: float = IDLE_S


class IdleLearning:
    """The learning of one LLM. Requests run inside `request`; any thread may ask for a problem, one closes."""

    def __init__(self, parts: LearningParts) -> None:
        """Start the thread. It loads the learner in the first idle moment."""
        self._parts = parts
        self._gate = IdleGate(parts.idle_s)
        self._closing = Event()
        self._is_interrupted = self._is_closed = False
        """Whether a `close` was interrupted, and whether one was finished."""
        self._waits_for: str | None = None
        self._num_empty_polls = 0
        """Polls that brought nothing to learn, since `wait` began."""
        self._judged_version: int | None = None
        self._thread = SupervisedThread(self._run, name="learning", is_over=self._closing.is_set)
        self._thread.start()
        atexit.register(self.close)

    def request(self) -> AbstractContextManager[None]:
        """Return the block in which a request runs and nothing is learned."""
        return self._gate.request()

    @property
    def problem(self) -> str | None:
        """Why nothing is learned any more, or what has to be decided before it goes on; None: all is well."""
        return self._waits_for or first_problem((self._parts.producer, self._thread))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was asked so far is learned, but for what does not fill a step; return whether it is.

        Raises:
            OmnidraftError: learning stands still.
        """
        deadline_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        is_recorded = self._wait_for(lambda: not self._parts.producer.num_waiting, deadline_s)
        self._num_empty_polls = 0  # the first one from now on may have begun before
        return is_recorded and self._wait_for(lambda: self._num_empty_polls > 1, deadline_s)

    def close(self) -> None:
        """Finish the step under way, publish what was learned, stop the thread and release the home.

        Requests are answered as before, and neither recorded nor learned. Where a call is interrupted, the next one
        goes on with it, at the end of the process if not before. After that a call does nothing.
        """
        if self._is_closed:
            return
        try:
            self._closing.set()
            self._parts.producer.close(FLUSH_S)
            self._gate.open()
            self._thread.join()
        except (KeyboardInterrupt, SystemExit):
            self._is_interrupted = True
            raise
        self._parts.controller.close()
        self._parts.home.close()
        atexit.unregister(self.close)
        self._is_closed = True

    def _run(self) -> None:
        settings = self._parts.settings
        if sys.platform.startswith("linux"):  # elsewhere it would be the priority of the whole process
            throttle.lower_priority()
        with openmp_threads(settings.threads or 1), throttle.gated(self._gate.wait):
            if self._must_stop():
                return
            make = self._parts.make_distiller
            distiller = make(progress=self._on_progress, on_empty_poll=self._on_empty_poll)
            with throttle.gated(partial(self._rest, distiller.poison_detector)):
                distiller.run(self._must_stop)

    def _rest(self, detector: PoisonDetector) -> None:
        """Wait between two pieces of a step while requests run. A user who ends the process then, or after interrupting
        `close`, does not accuse the step's records."""
        if self._is_interrupted:
            detector.suspend()
        self._gate.wait(detector.suspended)

    def _must_stop(self) -> bool:
        """Wait for an idle moment; return whether learning is to end. The distiller asks before whatever it begins."""
        self._gate.wait()
        return self._closing.is_set()

    def _on_empty_poll(self) -> None:
        self._num_empty_polls += 1

    def _on_progress(self, status: Status) -> None:
        """Note what the distiller waits for; judge a snapshot that it published."""
        self._waits_for = status.waits_for
        if status.version is not None and status.version != self._judged_version:
            self._judge()
            self._judged_version = status.version

    def _judge(self) -> None:
        """Promote the newest snapshot or refuse it, and serve the champion."""
        parts = self._parts
        try:
            parts.controller.step()
            if not self._closing.is_set():
                parts.updater.step(self._closing)
                parts.slot.drop_previous()  # memory is dear here, and a rollback may load it again
            parts.tidier.tidy()
        except (SnapshotError, BusError) as exc:
            logger.warning("the newest snapshot is judged with the next one: %s", exc)

    def _wait_for(self, reached: Callable[[], bool], deadline_s: float) -> bool:
        while not reached():
            if problem := self.problem:
                raise OmnidraftError(f"nothing is learned: {problem}")
            if self._closing.is_set() or time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        return True


class Tidier:
    """Keeps a home small: weights that nobody goes back to are deleted, and so are records that were learned.

    What stays of an old version is its manifest, a few kB: the gate sums the changes from the champion on.
    """

    def __init__(self, registry: Registry, delete_before: Callable[[Offsets], None], *, keep: int) -> None:
        """
        Args:
            delete_before: deletes the records before these offsets of the log.
            keep: the number of newest versions that learning can go on from, should the newest be damaged.
        """
        self._registry, self._delete_before, self._keep = registry, delete_before, keep
        self._removed: set[int] = set()

    def tidy(self) -> None:
        """Delete what neither serving nor learning needs any more. Raises RegistryError, BusError."""
        versions = self._registry.versions()
        newest = versions[-self._keep :]
        for each in superseded(versions, self._keep):
            if each.version not in self._removed:
                self._registry.remove_files(each.version, ALL_PARTS)
                self._removed.add(each.version)
        if len(newest) == self._keep:
            known = [each.manifest.offsets for each in newest]
            learned = {partition: min(each.get(partition, 0) for each in known) for partition in known[-1]}
            self._delete_before(learned)
