"""What a distiller does with its learner: steps, guarded against records that crash the process, and the content of a
snapshot between two of them."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from omnidraft.distill.evaluation.held_out import HeldOut, HeldOutMeasurement
from omnidraft.distill.evaluation.tenant_factors import FactorJudge
from omnidraft.distill.ingest.batch import Batch
from omnidraft.distill.ingest.batcher import TENANTS, Batcher
from omnidraft.distill.ingest.poison_detector import IN_SNAPSHOT, PoisonDetector
from omnidraft.distill.ingest.record_disposition import ANYBODY, record_key
from omnidraft.distill.ingest.trace_consumer import PartitionOffset
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.publisher import BATCHER, LEARNER, Restored
from omnidraft.distill.training.learner import Learner
from omnidraft.distill.training.step_report import Counters, StepReport
from omnidraft.snapshots import bundle
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

LoadCache = Callable[[Mapping[str, np.ndarray]], NgramCache]
"""Makes an n-gram cache of a snapshot's arrays; a new one without arrays."""
LoadBase = Callable[[], Mapping[str, Tensor]]
"""Returns the weights of the base drafter that are learned, unrounded, for a snapshot that has none of its own."""


class Learning:
    """One thread."""

    def __init__(
        self,
        learner: Learner,
        batcher: Batcher,
        *,
        load_cache: LoadCache,
        load_base: LoadBase,
        held_out: HeldOut,
        factor_judge: FactorJudge,
        detector: PoisonDetector,
        memory: TextMemory,
    ) -> None:
        """
        Args:
            held_out: measures snapshots.
            factor_judge: over the same learner.
            detector: its poison is the batcher's.
            memory: gets the records of every step.
        """
        self.learner, self._batcher, self.detector = learner, batcher, detector
        self._load_cache, self._load_base, self._memory = load_cache, load_base, memory
        self._held_out, self._factor_judge = held_out, factor_judge
        self._unmeasured: dict[int, PartitionOffset] = {}
        """Key -> position of the records that were held out since the last measurement."""

    def hold_out(self, batch: Batch) -> None:
        """Note where the records that the batch holds out are in the log, in case that measuring crashes on them."""
        self._unmeasured |= {record_key(record): (partition, offset) for partition, offset, record in batch.held_out}

    def step(self, batch: Batch) -> StepReport:
        """Learn from the batch, after each of its suspects was tried alone."""
        self._try_alone(dict(zip(batch.positions, batch.records, strict=True)))
        with self.detector.trying(batch.positions):
            report = self.learner.step(batch.records)
        self._memory.add(batch.records)
        return report

    def content(self) -> tuple[dict[str, bundle.Tensors], dict[str, Any], HeldOutMeasurement]:
        """Return the files of a snapshot of now, the fields of its manifest, and its measurement."""
        learner, serving = self.learner, self.learner.serving_tensors()
        measured = self._measure(serving)
        factors = self._factor_judge.refit(self._batcher.held_out, measured.hits, serving)
        files: dict[str, bundle.Tensors] = {
            bundle.DRAFTER: serving,
            bundle.NGRAMS: learner.cache.to_arrays(),
            LEARNER: learner.state(),
            BATCHER: self._batcher.state(),
            **factors.parts,
        }
        self._held_out.set_parent(serving, measured)
        return files, {**measured.facts(), **factors.facts(), **learner.counters.manifest_fields()}, measured

    def resume(self, restored: Restored) -> None:
        """Go on from a snapshot with all that it has: its counts, and its place in the log too, where `seek` is due.
        Raises ConfigError, WireError as `load_state` of learner and batcher."""
        manifest = restored.version.manifest
        self.go_back(restored)
        self.learner.counters = Counters.of(manifest)
        if restored.batcher is not None:
            self._batcher.load_state(restored.batcher, manifest.offsets)
        else:
            self._batcher.start_afresh(manifest.offsets)
            self._batcher.add_tenants(_tenants(restored))

    def go_back(self, restored: Restored) -> None:
        """Take the weights, optimizer, n-gram cache and replay buffer of a snapshot, with a fresh optimizer and nothing
        to replay where these are gone; keep counts, held-out records and the place in the log: what was learned since
        is unlearned, not repeated.

        Raises:
            ConfigError: its weights do not fit this learner, as its rank was another; then nothing changed.
        """
        if restored.learner is not None:
            self.learner.load_state(restored.learner)
        elif restored.serving is not None or self.learner.counters.num_steps:
            self.learner.start_afresh_from(self._load_base() if restored.serving is None else restored.serving)
        self.learner.cache = self._load_cache(restored.ngrams)
        self._batcher.add_tenants(_tenants(restored))
        self.set_parent()

    def set_parent(self) -> None:
        """Compare the next snapshot with the weights of now."""
        self._held_out.set_parent(self.learner.serving_tensors())

    def _measure(self, serving: Mapping[str, Tensor]) -> HeldOutMeasurement:
        """Measure the agreement of these serving tensors on the held-out records, but for poison."""
        if num_dropped := self._batcher.drop_held_out(lambda record: self._position(record) in self.detector.poison):
            logger.warning("%d held-out records are dropped: the process crashed on them", num_dropped)
        held_out = {self._position(record): record for record in self._batcher.held_out}
        self._try_alone(held_out)
        with self.detector.trying(list(held_out)):
            measured = self._held_out.measure(held_out.values(), serving)
        self._unmeasured.clear()
        return measured

    def _try_alone(self, records: Mapping[PartitionOffset, TraceRecord]) -> None:
        for position in self.detector.suspects(records):
            with self.detector.trying([position], alone=True):
                self.learner.dry_run(records[position])

    def _position(self, record: TraceRecord) -> PartitionOffset:
        """Return the position, for the detector, of a held-out record: in the log, or in a snapshot."""
        key = record_key(record)
        return self._unmeasured.get(key, (IN_SNAPSHOT, key))


def _tenants(restored: Restored) -> Collection[int]:
    """Return hashes of the tenants that a snapshot learned from."""
    if restored.batcher is not None:
        return frozenset(restored.batcher[TENANTS].tolist())
    return () if restored.version.manifest.train == "base" else {ANYBODY}
