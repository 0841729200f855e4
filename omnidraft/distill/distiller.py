"""The distiller, which learns every record exactly once: batches come from the ingest, the learner makes steps of them,
the publisher versions of the state after some steps.

A snapshot carries master weights, optimizer, n-gram cache, held-out records, the fleet's memory and the offsets it has
learned up to, and is made between two steps. So a process that resumes from the newest snapshot after a crash learns
nothing twice that any snapshot shows, and leaves nothing out.

A new process, an order to restart elsewhere in the log, to go back to an earlier version or to forget a tenant are one
thing: learning starts from a snapshot, at offsets, without tenants. The same three and the same log make the same bits.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from omnidraft.distill.control import DRIFT_HASTE, Status, StatusReporter, TrainingControl
from omnidraft.distill.forgetting import Forgetting
from omnidraft.distill.ingest.batch import Batch
from omnidraft.distill.ingest.ingest import Ingest
from omnidraft.distill.ingest.trace_consumer import SKIPPED
from omnidraft.distill.learning import Learning
from omnidraft.distill.publisher import Publisher
from omnidraft.distill.retrying import Result, Stop, Wait, retry, wait
from omnidraft.distill.start import Start, newest_without
from omnidraft.distill.training.step_report import LearningSpans, StepReport, count, mean_losses
from omnidraft.errors import BusError, ConfigError, LogReplaced, SnapshotCorrupt, SnapshotNotFound
from omnidraft.ports import OVER_SHARE, Forget, Metrics, NoopTracing
from omnidraft.snapshots import bundle

CONTROL_TIMEOUT_S = 2.0
"""The wait for the control log at a start."""
PAUSED_S = 0.2
WAITING_S = 2.0
"""Seconds between two checks whether a log that was replaced is back, or a restart was ordered."""

logger = logging.getLogger(__name__)


class Distiller:
    """The training loop of one drafter for one target. `run` belongs to one thread, `status` to any."""

    def __init__(
        self,
        ingest: Ingest,
        learning: Learning,
        publisher: Publisher,
        forgetting: Forgetting,
        *,
        steps_per_snapshot: int,
        metrics: Metrics,
        control: TrainingControl | None = None,
        compare_earlier: Callable[[str], None] = lambda tenant: None,
        progress: Callable[[Status], None] = lambda status: None,
        on_empty_poll: Callable[[], None] = lambda: None,
        spans: LearningSpans | None = None,
        wait: Wait = wait,
    ) -> None:
        """
        Args:
            ingest: over the same batcher as `learning` and `forgetting`.
            control: polled before every step; while learning is paused, nothing is read or learned.
            compare_earlier: called once for each tenant that begins to drift; see snapshot_comparison.py.
            progress: called after every step and every snapshot, in the thread of `run`.
            on_empty_poll: called after every poll that did not complete a batch, likewise.
            spans: the spans of steps and snapshots; `wait` sleeps between two tries.
        """
        self.ingest, self._learning, self._publisher, self._forgetting = ingest, learning, publisher, forgetting
        self._steps_per_snapshot, self._metrics, self._wait = steps_per_snapshot, metrics, wait
        self.control, self._compare_earlier = control or TrainingControl(), compare_earlier
        self._on_empty_poll, self._spans = on_empty_poll, spans or LearningSpans(NoopTracing(), "")
        self._learner, self.poison_detector = learning.learner, learning.detector
        self._reports: list[StepReport] = []  # since the newest snapshot
        self._reporter = StatusReporter(self._learner, ingest.batcher, metrics, progress)

    def status(self) -> Status:
        return self._reporter.status

    def run(self, stop: Stop) -> None:
        """Go on from the newest snapshot, or publish the base drafter as the first one; then learn until `stop`.

        Order of effects: step; after `steps_per_snapshot` of them measure, write the snapshot, publish it. On `stop`
        the step under way is finished and the steps since the newest snapshot are published.

        Raises:
            SnapshotStale: another distiller published for this pair; the steps since then are dropped.
            ConfigError, VocabularyError: the newest snapshot is not one that this learner can go on from.
            BusError: the log was away for a dead letter when `stop` came, and the steps since the newest snapshot
                are dropped.
        """
        self._open(stop)
        while not stop():
            if order := self._next_order(stop):
                self._start_again(order, stop)
            elif self.control.is_paused:
                self._wait(PAUSED_S, stop)
            elif batch := self._next_batch(stop):
                self._learn(batch, stop)
                if len(self._reports) >= self._num_steps_due():
                    self._publish(stop)
            elif self.ingest.ends_catching_up():
                self._publish(stop)
            else:
                self._on_empty_poll()
        self._publish_steps(stop)

    def _open(self, stop: Stop) -> None:
        self._retry(lambda: self.control.start(CONTROL_TIMEOUT_S), stop)
        restored = self._retry(self._publisher.restore, stop)
        if restored is not None:
            self._take_up(Start(restored))
        else:
            self._learning.set_parent()
            self.ingest.mark_done(self.control.restart)  # it was meant for those who had learned something
            self._forgetting.mark_done(self._forgetting.note(self.control.new_forgets()))
            self._publish_base(stop)
        self._reporter.update(version=self._publisher.parent and self._publisher.parent.version)
        self._seek(stop)

    def _start_again(self, start: Start, stop: Stop) -> None:
        """Take up the start, then publish it. So whoever resumes from the snapshot before does it again, and whoever
        resumes from the one after does not. Where a snapshot does not fit this learner, learning goes on as it is."""
        try:
            needs_cache = self._take_up(start)
        except ConfigError as exc:
            logger.error("learning goes on as it is: %s", exc)
            if start.without:
                self._start_again(Start(without=start.without), stop)
            return
        self._seek(stop)
        if needs_cache:
            self._retry(self._forgetting.rebuild_cache, stop)
        self._forgetting.mark_done(start.without)
        self._publish(stop)

    def _take_up(self, start: Start) -> bool:
        """Have the learner's state and the place in the log that learning starts from; `seek` is due. Return whether
        the n-gram cache may know of tenants who are forgotten. Raises ConfigError; then only the memory changed."""
        restored, has_forgotten = start.snapshot, bool(start.without)
        if restored is not None:
            has_forgotten |= not self._forgetting.is_done_in(restored.version.manifest)
        if restored is not None and start.offsets is None:
            self._learning.resume(restored)
            self.ingest.resume(restored.version.manifest)
            self._forgetting.resume(restored.version.manifest)
            self._publisher.go_on_from(restored.version)
            self._reports.clear()
        elif restored is not None:
            self._learning.go_back(restored)
            self._publisher.go_on_from(restored.version, continues=self._publisher.parent)
        if start.offsets is not None and (restored is None or start.offsets != self.ingest.batcher.offsets()):
            self.ingest.restart_at(start.offsets)
            self.poison_detector.clear()
        if start.catching_up_to:
            self.ingest.catch_up(start.catching_up_to)
        self._learner.count_skipped(self.ingest.batcher.take_skipped())
        self.ingest.batcher.start_at(self.ingest.batcher.offsets())  # what was read is read again, without them
        self._forgetting.note(start.without)
        self._forgetting.drop(restored.num_forgotten if restored else 0)
        self._forgetting.renew_keys(start.without)
        if restored is not None:
            version = restored.version
            logger.info(
                "learning starts from snapshot %d at offsets %s", version.version, self.ingest.batcher.offsets()
            )
        return has_forgotten and not start.catching_up_to

    def _next_order(self, stop: Stop) -> Start | None:
        """Return where an order that was not carried out yet has learning start. It is preceded by a snapshot of the
        steps so far where these would be left behind."""
        if restart := self._next_restart(stop):
            return restart
        if orders := self._forgetting.note(self.control.new_forgets()):
            return self._retry(partial(self._start_without, orders), stop)
        if (rewind := self.control.rewind) is not None and rewind != self._publisher.settled_rewind:
            earlier = self._retry(partial(self._publisher.version_before, rewind), stop)
            self._publisher.settled_rewind = rewind
            if earlier is not None and self.control.is_to_forget(earlier.version.manifest):
                logger.error("learning does not go back to a version whose weights are to forget a tenant")
            elif earlier is not None:
                self._publish_steps(stop)
                logger.warning("learning goes back to version %d, as ordered", earlier.version.version)
                return Start(earlier, self.ingest.batcher.offsets())
        for tenant in self.control.new_drifts():
            self._compare_earlier(tenant)
        return None

    def _next_restart(self, stop: Stop) -> Start | None:
        """Return where an operator's order to restart has learning start, likewise."""
        self.control.poll()
        self._follow_pause(stop)
        if (order := self.control.restart) is None or not self.ingest.is_new(order):
            return None
        self._publish_steps(stop)
        offsets = self._retry(partial(self.ingest.ordered_offsets, order), stop)
        self.ingest.mark_done(order)
        return None if offsets is None else Start(offsets=offsets)

    def _start_without(self, orders: Mapping[str, Forget]) -> Start:
        """Return where learning starts to forget these tenants: where weights are to forget too, from before them."""
        if not self._forgetting.is_due_in_weights(orders):
            return Start(without=orders)
        log_id, firsts, _ = self.ingest.read_log()
        version = newest_without(self._publisher.registry, self.control.forgets, log_id, firsts)
        try:
            if version is None:
                raise SnapshotNotFound("no snapshot is from before them")
            restored = self._publisher.restore(version.version)
        except (SnapshotCorrupt, SnapshotNotFound) as exc:
            logger.error("weights keep what they learned of %d tenants: %s", len(orders), exc)
            return Start(without=orders)
        return Start(restored, without=orders, catching_up_to=self.ingest.farthest_offsets())

    def _follow_pause(self, stop: Stop) -> None:
        if (is_paused := self.control.is_paused) != self._reporter.status.is_paused:
            logger.info("learning %s", "paused" if is_paused else "goes on")
            self._reporter.update(is_paused=is_paused)
            if not is_paused:
                self._seek(stop)  # the log may have changed meanwhile

    def _seek(self, stop: Stop) -> None:
        """Return when the consumer is where the batcher goes on, or `stop` holds; until then only restarts happen."""
        while not stop():
            try:
                self._retry(self.ingest.seek, stop)
                return self._reporter.update(waits_for=None)
            except LogReplaced as exc:
                if self._reporter.status.waits_for != str(exc):
                    logger.error("learning stands still: %s", exc)
                self._reporter.update(waits_for=str(exc))
            if restart := self._next_restart(stop):
                self._start_again(restart, stop)
            else:
                self.meanwhile()
                self._wait(WAITING_S, stop)

    def meanwhile(self) -> None:
        """Keep nothing of tenants who are to be forgotten, while the thread of `run` waits; a snapshot follows."""
        self.control.poll()
        self._forgetting.note(self.control.new_forgets())

    def _num_steps_due(self) -> int:
        """Return the number of steps between snapshots. Weights do not depend on how often they are published."""
        haste = DRIFT_HASTE if self.control.is_drifting else 1
        return max(1, self._steps_per_snapshot // haste)

    def _next_batch(self, stop: Stop) -> Batch | None:
        """Return the next batch; None after a poll that did not complete one."""
        try:
            return self.ingest.next_batch(lambda poll: self._retry(poll, stop))
        except LogReplaced:
            self._seek(stop)
        except BusError:  # stopping, and the log is away: the steps so far can still be published
            pass
        finally:
            self._learner.count_skipped(self.ingest.batcher.take_skipped())
        return None

    def _learn(self, batch: Batch, stop: Stop) -> None:
        """Count what the batch skips, and make a step of its records, if it has any."""
        self._retry(lambda: self.ingest.dead_letter_poison(batch), stop)
        self._metrics.add(SKIPPED, batch.num_over_share, reason=OVER_SHARE)
        self._learner.count_skipped(batch.skipped())
        self._learning.hold_out(batch)
        if not batch.records:
            return
        span = self._spans.step(batch, self._learner.counters.num_steps)
        report = self._learning.step(batch)
        span.end(tokens=report.num_tokens, **{f"loss.{name}": loss for name, loss in report.losses.items()})
        self._reports.append(report)
        count(report, self._metrics)
        self._reporter.update(losses=report.losses, tokens_per_s=report.num_tokens / report.duration_s)

    def _publish_base(self, stop: Stop) -> None:
        parts = {bundle.NGRAMS: self._learner.cache.to_arrays()}
        fields = {"train": "base", **self.ingest.log_fields(), **self._forgetting.manifest_fields()}
        version = self._publisher.publish(parts, fields, partial(self._retry, stop=stop)).version
        logger.info("published the base drafter as snapshot %d", version)

    def _publish_steps(self, stop: Stop) -> None:
        if self._reports:
            self._publish(stop)

    def _publish(self, stop: Stop) -> None:
        span, losses = self._spans.snapshot(), mean_losses(self._reports)
        self._forgetting.drop()
        log_fields = self.ingest.begin_snapshot() | self._forgetting.manifest_fields()
        self._learner.count_skipped(self.ingest.batcher.take_skipped())
        parts, fields, measured = self._learning.content()
        fields |= {**log_fields, "losses": losses, "traceparent": span.context}
        published = self._publisher.publish(parts, fields, partial(self._retry, stop=stop))
        span.end(version=published.version, records=self._learner.counters.num_records)
        self.poison_detector.published(self.ingest.batcher.offsets())
        self._reports.clear()
        self._reporter.report_snapshot(published.version, measured, losses)
        if log_fields["passed_over"]:
            self._seek(stop)

    def _retry(self, action: Callable[[], Result], stop: Stop) -> Result:
        on_failure = partial(self._metrics.add, "omnidraft_learner_errors_total")
        return retry(action, stop, on_failure, self.meanwhile, wait=self._wait)
