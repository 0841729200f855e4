"""The distiller, which learns every record exactly once: it reads records, learns from them step by step and publishes
snapshots, until it is to stop.

A snapshot carries master weights, optimizer, n-gram cache, held-out records, the fleet's memory and the offsets it has
learned up to, and is made between two steps. So a process that resumes from the newest snapshot after a crash learns
nothing twice that any snapshot shows, and leaves nothing out.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from omnidraft.distill.control import DRIFT_HASTE, Status, StatusReporter, TrainingControl
from omnidraft.distill.evaluation.held_out import HeldOut
from omnidraft.distill.evaluation.tenant_factors import FactorJudge
from omnidraft.distill.forgetting import Forgetting, RecordRetention
from omnidraft.distill.ingest.batch_reader import BatchReader
from omnidraft.distill.ingest.batcher import Batch, Batcher
from omnidraft.distill.ingest.log_position import TruncationMark
from omnidraft.distill.ingest.poison_detector import PoisonDetector
from omnidraft.distill.ingest.trace_consumer import SKIPPED, TraceConsumer
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.poison_guard import PoisonGuard
from omnidraft.distill.publisher import BATCHER, LEARNER, Publisher, Restored
from omnidraft.distill.restoring import LoadBase, LoadCache, go_back, go_on
from omnidraft.distill.retrying import Result, Stop, Wait, retry, wait
from omnidraft.distill.training.learner import Learner
from omnidraft.distill.training.step_report import LearningSpans, StepReport, count, mean_losses
from omnidraft.errors import BusError, ConfigError, LogReplaced
from omnidraft.ports import OVER_SHARE, Forget, Metrics, NoopTracing, Restart
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
        consumer: TraceConsumer,
        batcher: Batcher,
        learner: Learner,
        publisher: Publisher,
        *,
        load_cache: LoadCache,
        load_base: LoadBase,
        held_out: HeldOut | None = None,
        factor_judge: FactorJudge | None = None,
        steps_per_snapshot: int,
        max_lag_records: int = 0,
        poison_detector: PoisonDetector | None = None,
        truncation: TruncationMark | None = None,
        forgetting: Forgetting | None = None,
        memory: TextMemory | None = None,
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
            load_cache: as load_base, see restoring.py; without arrays it makes a new n-gram cache.
            held_out: measures snapshots; None measures them on the batcher's held-out records alone.
            factor_judge: over the same learner; None gives no tenant any factors.
            control: polled before every step; while learning is paused, nothing is read or learned.
            compare_earlier: called once for each tenant that begins to drift; see snapshot_comparison.py.
            max_lag_records: see batch_reader.py.
            poison_detector: gets every step before it runs; its poison is the batcher's. None: crashes are not noted.
            truncation: None: the next process does not know that the log lost messages.
            forgetting: over the same batcher, learner and memory. None: records stay until a tenant is forgotten.
            progress: called after every step and every snapshot, in the thread of `run`.
            on_empty_poll: called after every poll that did not complete a batch, likewise.
            spans: the spans of steps and snapshots; `wait` sleeps between two tries.
        """
        self._consumer, self._batcher, self._learner, self._publisher = consumer, batcher, learner, publisher
        self._load_cache, self._load_base, self._steps_per_snapshot = load_cache, load_base, steps_per_snapshot
        self._control, self._compare_earlier = control or TrainingControl(), compare_earlier
        self._metrics = metrics
        self.poison_detector = poison_detector or PoisonDetector(Path(), tries=0)
        self._reader = BatchReader(consumer, batcher, metrics, truncation, max_lag_records=max_lag_records)
        self._held_out = held_out or HeldOut(learner)
        self._factor_judge = factor_judge or FactorJudge(learner)
        self._learning = PoisonGuard(learner, batcher, self._held_out, self.poison_detector, memory)
        new_cache = partial(load_cache, {})
        self._forgetting = forgetting or Forgetting(RecordRetention(), batcher, learner, metrics, new_cache=new_cache)
        self._on_empty_poll, self._wait, self._spans = on_empty_poll, wait, spans or LearningSpans(NoopTracing(), "")
        self._reports: list[StepReport] = []  # since the newest snapshot
        self._reporter = StatusReporter(learner, batcher, metrics, progress)

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
        self._start(stop)
        while not stop():
            self._follow_control(stop)
            if self._control.is_paused:
                self._wait(PAUSED_S, stop)
            elif batch := self._next_batch(stop):
                self._learn(batch, stop)
                if len(self._reports) >= self._num_steps_due():
                    self._publish(stop)
            else:
                self._on_empty_poll()
        if self._reports:
            self._publish(stop)

    def _start(self, stop: Stop) -> None:
        self._retry(lambda: self._control.start(CONTROL_TIMEOUT_S), stop)
        restored = self._retry(self._publisher.restore, stop)
        if restored:
            self._resume(restored)
        self._held_out.set_parent(self._learner.serving_tensors())
        if restored is None:
            self._reader.position.mark_done(self._control.restart)  # it was meant for those who had learned something
            self._forgetting.mark_done(self._forgetting.note(self._control.new_forgets()))
            self._publish_base(stop)
        self._reporter.update(version=self._publisher.parent and self._publisher.parent.version)
        self._seek(stop)

    def _resume(self, restored: Restored) -> None:
        manifest = restored.version.manifest
        self._reader.resume(manifest)
        go_on(restored, self._learner, self._batcher, self._load_cache)
        self._forgetting.resume(manifest, restored.num_forgotten)
        logger.info("going on from snapshot %d at offsets %s", restored.version.version, manifest.offsets)

    def _seek(self, stop: Stop) -> None:
        """Return when the consumer is where the batcher goes on, or `stop` holds."""
        while not stop():
            try:
                self._retry(self._reader.seek, stop)
                return self._reporter.update(waits_for=None)
            except LogReplaced as exc:
                if self._reporter.status.waits_for != str(exc):
                    logger.error("learning stands still: %s", exc)
                self._reporter.update(waits_for=str(exc))
            self._follow_control(stop)
            self._wait(WAITING_S, stop)

    def _restart(self, order: Restart, stop: Stop) -> None:
        """Publish the steps so far; move; publish the new offsets. So a restart is carried out once, and the snapshots
        before and after it each account for a range of one log."""
        if self._reports:
            self._publish(stop)
        if self._retry(lambda: self._reader.restart(order), stop):
            self.poison_detector.clear()
            self._publish(stop)

    def _rewind(self, order: str, stop: Stop) -> None:
        """Publish the steps so far; go back to the champion's weights; publish them with the present offsets. Whoever
        resumes from the snapshot before does it again; the one after does not descend from what was refused. Where the
        champion does not fit this learner, learning goes on as it is."""
        champion = self._retry(lambda: self._publisher.champion_before(order), stop)
        if champion is None:
            self._publisher.settled_rewind = order
            return
        if self._reports:
            self._publish(stop)
        try:
            go_back(champion, self._learner, self._load_cache, self._load_base)
        except ConfigError as exc:
            logger.error("learning does not go back to champion %d: %s", champion.version.version, exc)
            self._publisher.settled_rewind = order
            return
        self._retry(lambda: self._forgetting.go_back(champion.version.manifest, champion.num_forgotten), stop)
        self._publisher.go_back_to(champion.version, order)
        self._held_out.set_parent(self._learner.serving_tensors())
        logger.warning("learning goes back to champion %d, as ordered", champion.version.version)
        self._publish(stop)

    def _forget(self, orders: Mapping[str, Forget], stop: Stop) -> None:
        """Read buffered records again, now without these tenants; publish a snapshot that knows nothing of them."""
        self._learner.count_skipped(self._batcher.take_skipped())
        self._batcher.start_at(self._batcher.offsets())
        self._seek(stop)
        self._retry(lambda: self._forgetting.carry_out(orders), stop)
        self._publish(stop)

    def _follow_control(self, stop: Stop) -> None:
        self._control.poll()
        if (is_paused := self._control.is_paused) != self._reporter.status.is_paused:
            logger.info("learning %s", "paused" if is_paused else "goes on")
            self._reporter.update(is_paused=is_paused)
            if not is_paused:
                self._seek(stop)  # the log may have changed meanwhile
        if (order := self._control.restart) is not None and self._reader.position.is_new(order):
            self._restart(order, stop)
        if orders := self._forgetting.note(self._control.new_forgets()):
            self._forget(orders, stop)
        if (rewind := self._control.rewind) is not None and rewind.id != self._publisher.settled_rewind:
            self._rewind(rewind.id, stop)
        for tenant in self._control.new_drifts():
            self._compare_earlier(tenant)

    def meanwhile(self) -> None:
        """Keep nothing of tenants who are to be forgotten, while the thread of `run` waits; a snapshot follows."""
        self._control.poll()
        self._forgetting.note(self._control.new_forgets())

    def _num_steps_due(self) -> int:
        """Return the number of steps between snapshots. Weights do not depend on how often they are published."""
        haste = DRIFT_HASTE if self._control.is_drifting else 1
        return max(1, self._steps_per_snapshot // haste)

    def _next_batch(self, stop: Stop) -> Batch | None:
        """Return the next batch; None after a poll that did not complete one."""
        try:
            return self._reader.next_batch(lambda poll: self._retry(poll, stop))
        except LogReplaced:
            self._seek(stop)
        except BusError:  # stopping, and the log is away: the steps so far can still be published
            pass
        finally:
            self._learner.count_skipped(self._batcher.take_skipped())
        return None

    def _learn(self, batch: Batch, stop: Stop) -> None:
        """Count what the batch skips, and make a step of its records, if it has any."""
        if batch.poison:
            self._retry(lambda: self._consumer.dead_letter(batch.poison), stop)
            logger.warning("%d records are dead letters: the process crashed on them", len(batch.poison))
        self._metrics.add(SKIPPED, batch.num_over_share, reason=OVER_SHARE)
        self._learner.count_skipped(batch.skipped())
        self._learning.prepare(batch)
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
        fields = {"train": "base", **self._reader.position.manifest_fields(), **self._forgetting.manifest_fields()}
        staged = self._retry(lambda: self._publisher.stage(parts, **fields), stop)
        version = self._retry(lambda: self._publisher.publish(staged), stop).version
        logger.info("published the base drafter as snapshot %d", version)

    def _publish(self, stop: Stop) -> None:
        span = self._spans.snapshot()
        learner, counters = self._learner, self._learner.counters
        self._forgetting.drop_expired()
        log_fields = self._reader.begin_snapshot() | self._forgetting.manifest_fields()
        learner.count_skipped(self._batcher.take_skipped())
        serving, losses = learner.serving_tensors(), mean_losses(self._reports)
        measured = self._learning.measure(serving)
        factors = self._factor_judge.refit(self._batcher.held_out, measured.hits, serving)
        parts: dict[str, bundle.Tensors] = {
            bundle.DRAFTER: serving,
            bundle.NGRAMS: learner.cache.to_arrays(),
            LEARNER: learner.state(),
            BATCHER: self._batcher.state(),
            **factors.parts,
        }
        fields = log_fields | measured.facts() | factors.facts() | counters.manifest_fields()
        fields |= {"losses": losses, "traceparent": span.context}
        staged = self._retry(lambda: self._publisher.stage(parts, **fields), stop)
        published = self._retry(lambda: self._publisher.publish(staged), stop)
        span.end(version=published.version, records=counters.num_records)
        self.poison_detector.published(self._batcher.offsets())
        self._held_out.set_parent(serving, measured)
        self._reports.clear()
        self._reporter.report_snapshot(published.version, measured, losses)
        self._publisher.log_curves()
        if log_fields["passed_over"]:
            self._seek(stop)

    def _retry(self, action: Callable[[], Result], stop: Stop) -> Result:
        on_failure = partial(self._metrics.add, "omnidraft_learner_errors_total")
        return retry(action, stop, on_failure, self.meanwhile, wait=self._wait)
