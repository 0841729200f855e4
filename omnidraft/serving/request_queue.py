"""A bounded fair queue of requests for each engine, and the one thread that decodes them, round by round in turn."""

import logging
import threading
import time
from collections import defaultdict

from omnidraft.decode.decoder import SequenceOutput
from omnidraft.decode.engine import Engine
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Metrics
from omnidraft.serving.fair_queue import EngineQueue
from omnidraft.serving.queued_request import Abandoned, QueuedRequest, QueueFull, Stopping, end_status
from omnidraft.threads import SupervisedThread

logger = logging.getLogger(__name__)

START_S = 0.1
"""Seconds in which requests are started before the others' next round; one always is."""
LAST_STEP_S = 2.0
"""The time that `close` waits for the current pass after the deadline."""


class RequestQueue:
    """A bounded queue for each engine, all in front of one decoding thread.

    Each engine decodes many texts together, and the engines take turns, a round each. So two targets never compute at
    once, and no request waits for a long text of another target, nor for its queue.
    """

    def __init__(self, metrics: Metrics, *, max_waiting: int) -> None:
        """`max_waiting` requests may wait for each engine, besides those that it decodes."""
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._queues: defaultdict[Engine, EngineQueue] = defaultdict(EngineQueue)
        self._is_closed = False
        self._is_past_deadline = False
        self._changed = threading.Condition()  # over all of the above
        self._thread = SupervisedThread(self._run, name="decoding", is_over=lambda: self._is_closed)
        self._thread.start()

    def submit(self, request: QueuedRequest) -> QueuedRequest:
        """Add a request to the queue of its engine and return it. Raises QueueFull, Stopping."""
        with self._changed:
            queue = self._queues[request.engine]
            try:
                self._admit(queue, request)
            except (QueueFull, Stopping) as exc:
                self.count(request, exc)
                raise
            queue.waiting.add(request)
            self._set_gauges(request.engine)
            self._changed.notify()
        return request

    def abandon(self, request: QueuedRequest) -> None:
        """End a request whose client went away: at once if it waits, else before the next round."""
        request.is_abandoned = True
        with self._changed:
            was_waiting = self._queues[request.engine].waiting.remove(request)
            self._set_gauges(request.engine)
        if was_waiting:
            self._end(request, Abandoned("the client went away before its turn"))

    @property
    def problem(self) -> str | None:
        """The reason why nothing is decoded, for the operator to restart it; None while the thread runs."""
        return None if self._thread.is_alive() else self._thread.problem or "the decoding thread ended"

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken."""
        return self.problem is None and not self._is_closed

    @property
    def num_texts(self) -> int:
        """The number of texts that are decoded now, of all engines."""
        with self._changed:
            return sum(len(queue.texts) for queue in self._queues.values())

    def require_open(self) -> None:
        """Raise Stopping unless new requests are taken."""
        if not self.is_open:
            raise Stopping("the worker is stopping; ask another one")

    def stop_accepting(self) -> None:
        """Refuse new requests; accepted ones go on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Refuse new requests, finish accepted ones within `timeout_s`, and end the rest with Stopping."""
        self.stop_accepting()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_past_deadline = True
            late = [request for queue in self._queues.values() for request in queue.waiting.clear()]
        for request in late:
            self._end(request, Stopping("the worker stopped before this request's turn; ask another one"))
        self._thread.join(LAST_STEP_S)

    def _admit(self, queue: EngineQueue, request: QueuedRequest) -> None:
        """Raises QueueFull, Stopping. A full queue may evict the newest request of another client instead."""
        self.require_open()
        if len(queue.waiting) < self._max_waiting:
            return
        full = QueueFull(f"{self._max_waiting} requests are waiting already; try again later", queue.retry_after_s())
        evicted = queue.waiting.evict_for(request.client)
        if evicted is None:
            raise full
        self._end(evicted, full)

    def _run(self) -> None:
        """Serve until the queue is closed. What ends this thread ends all requests: nobody else would."""
        try:
            self._serve()
        except Exception as exc:
            self.stop_accepting()
            with self._changed:
                queues = list(self._queues.values())
                unserved = [each for queue in queues for each in (*queue.running, *queue.waiting.clear())]
            for request in unserved:
                self._end(request, exc)
            raise

    def _serve(self) -> None:
        while queues := self._queues_with_work():
            for engine, queue in queues:
                self._start_waiting(engine, queue)
                self._end_aborted(queue)
                if queue.scoring:
                    self._score(queue)
                if queue.texts:
                    self._step(engine, queue)

    def _queues_with_work(self) -> list[tuple[Engine, EngineQueue]]:
        """Wait until there is work and return all queues; none when this one is closed and all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_any_request())
            return list(self._queues.items()) if self._is_any_request() else []

    def _is_any_request(self) -> bool:
        return any(len(queue.waiting) or queue.running for queue in self._queues.values())

    def _start_waiting(self, engine: Engine, queue: EngineQueue) -> None:
        """Start waiting requests, as many as the engine has room for, for START_S; those that are refused take no
        room."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            with self._changed:
                if not len(queue.waiting) or not engine.has_room(queue.waiting.peek().client, queue.scoring.clients):
                    return
                request = queue.waiting.next()
                queue.running[request] = time.monotonic()
                self._set_gauges(engine)
            if request.scores_prompts:
                queue.scoring.add(request)
            else:
                self._try_to_start(request, queue)

    def _score(self, queue: EngineQueue) -> None:
        """Score a piece of a prompt, and start its request after the last one."""
        request = queue.scoring.first()
        try:
            is_complete, seconds = queue.scoring.step()
        except Exception as exc:  # as below
            self._finish(request, queue, exc)
            return
        with self._changed:
            queue.waiting.charge(request.client, seconds)
        if is_complete:
            self._try_to_start(request, queue)

    def _try_to_start(self, request: QueuedRequest, queue: EngineQueue) -> None:
        began_s = time.monotonic()
        try:
            self._start(request, queue)
        except Exception as exc:  # one request's failure must not end the thread that serves all others
            self._finish(request, queue, exc)
        with self._changed:
            queue.waiting.charge(request.client, time.monotonic() - began_s)

    def _start(self, request: QueuedRequest, queue: EngineQueue) -> None:
        """Add all texts of a request to the next rounds, with one snapshot."""
        snapshot = None
        request.tokenize()
        for index, text in enumerate(request.texts):
            text.stats.begin()
            text.sequence = request.engine.add_request(
                text.request,
                snapshot,
                client=request.client,
                cache_scope=request.cache_scope,
                decoded=text.decoded,
            )
            snapshot = text.sequence.snapshot
            queue.texts[text.sequence] = request, index

    def _step(self, engine: Engine, queue: EngineQueue) -> None:
        """Run one round, hand its steps over, and charge its time to the clients."""
        began_s = time.monotonic()
        outputs = engine.step()
        self._charge(queue, time.monotonic() - began_s)
        for output in outputs:
            self._hand_over(output, queue)

    def _hand_over(self, output: SequenceOutput, queue: EngineQueue) -> None:
        if output.sequence not in queue.texts:
            return  # another text of its request failed in the same round
        request, index = queue.texts[output.sequence]
        if output.step is not None:
            request.texts[index].stats.take(output.step)
            request.put((index, output.step))
        if output.error is not None:
            self._finish(request, queue, output.error)
        elif output.sequence.is_over:
            del queue.texts[output.sequence]
            if all(other is not request for other, _ in queue.texts.values()):
                self._finish(request, queue, None)

    def _end_aborted(self, queue: EngineQueue) -> None:
        """End the requests whose clients went away, and all of them after the deadline."""
        for request in list(queue.running):
            if request.is_abandoned:
                self._finish(request, queue, Abandoned("the client went away"))
            elif self._is_past_deadline:
                self._finish(request, queue, Stopping("the worker stopped before this text's end; ask another one"))

    def _finish(self, request: QueuedRequest, queue: EngineQueue, error: Exception | None) -> None:
        """End a running request and those of its texts that still run."""
        if error is not None and not isinstance(error, OmnidraftError):
            logger.error("request %s failed", request.request_id, exc_info=error)
        queue.scoring.remove(request)
        for text in request.texts:
            if text.sequence is not None:
                request.engine.abort(text.sequence)
                queue.texts.pop(text.sequence, None)
        with self._changed:
            queue.durations_s.append(time.monotonic() - queue.running.pop(request))
            self._set_gauges(request.engine)
        self._end(request, error)

    def _charge(self, queue: EngineQueue, seconds: float) -> None:
        """Charge the seconds of a round to the clients, by the number of their texts."""
        with self._changed:
            for request, _ in queue.texts.values():
                queue.waiting.charge(request.client, seconds / len(queue.texts))

    def _end(self, request: QueuedRequest, error: Exception | None) -> None:
        """Count a request, observe its statistics, and hand the end over to its reader."""
        self.count(request, error)
        target, stats = request.engine.pair.target, request.stats
        if stats.num_passes:
            first_token_s = request.texts[0].stats.first_token_s
            self._metrics.observe("omnidraft_time_to_first_token_seconds", first_token_s, target=target)
        if stats.agreement is not None:
            self._metrics.observe("omnidraft_agreement_ratio", stats.agreement, target=target)
        request.put(error)

    def count(self, request: QueuedRequest, error: Exception | None) -> None:
        """Count the end of a request, also of one that never was in the queue."""
        self._metrics.add("omnidraft_requests_total", status=end_status(error), target=request.engine.pair.target)

    def _set_gauges(self, engine: Engine) -> None:
        queue, target = self._queues[engine], engine.pair.target
        self._metrics.set("omnidraft_requests_waiting", len(queue.waiting), target=target)
        self._metrics.set("omnidraft_requests_running", len(queue.running), target=target)
