"""Steps and measurements of a learner, guarded against records that crash the process."""

import logging
from collections.abc import Mapping

from torch import Tensor

from omnidraft.distill.evaluation.held_out import HeldOut, HeldOutMeasurement
from omnidraft.distill.ingest.batcher import Batch, Batcher
from omnidraft.distill.ingest.poison_detector import SNAPSHOT, PoisonDetector
from omnidraft.distill.ingest.record_disposition import record_key
from omnidraft.distill.ingest.trace_consumer import PartitionOffset
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.training.learner import Learner
from omnidraft.distill.training.step_report import StepReport
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)


class PoisonGuard:
    """Learns from batches and measures held-out records. One thread."""

    def __init__(
        self,
        learner: Learner,
        batcher: Batcher,
        held_out: HeldOut,
        detector: PoisonDetector,
        memory: TextMemory | None = None,
    ) -> None:
        """`memory` gets the records of every step; None: nothing remembers them."""
        self._learner, self._batcher, self._held_out, self._detector = learner, batcher, held_out, detector
        self._memory = memory
        self._unmeasured: dict[PartitionOffset, int] = {}
        """Position -> key of the records that were held out since the last measurement."""

    def prepare(self, batch: Batch) -> None:
        """Try each suspect of the batch alone, and note what is held out. Called before `step`."""
        held_out = {(partition, offset): record for partition, offset, record in batch.held_out}
        records = dict(zip(batch.positions, batch.records, strict=True)) | held_out
        self._try_alone(records)
        self._unmeasured |= {position: record_key(record) for position, record in held_out.items()}

    def step(self, batch: Batch) -> StepReport:
        """Learn from the batch."""
        self._detector.start(batch.positions)
        report = self._learner.step(batch.records)
        self._detector.finish()
        if self._memory is not None:
            self._memory.add(batch.records)
        return report

    def measure(self, serving: Mapping[str, Tensor]) -> HeldOutMeasurement:
        """Measure the agreement of these serving tensors on the held-out records, without poison of a snapshot."""
        if num_dropped := self._batcher.drop_held_out(lambda record: _position(record) in self._detector.poison):
            logger.warning("%d held-out records are dropped: the process crashed on them", num_dropped)
        new = set(self._unmeasured.values())
        earlier = {_position(each): each for each in self._batcher.held_out if record_key(each) not in new}
        self._try_alone(earlier)
        self._detector.start([*self._unmeasured, *earlier])
        measured = self._held_out.measure(self._batcher.held_out, serving)
        self._detector.finish()
        self._unmeasured.clear()
        return measured

    def _try_alone(self, records: Mapping[PartitionOffset, TraceRecord]) -> None:
        for position in self._detector.suspects(records):
            self._detector.start([position], alone=True)
            self._learner.dry_run(records[position])
            self._detector.finish()


def _position(record: TraceRecord) -> PartitionOffset:
    """Return the position, for the detector, of a held-out record of a snapshot."""
    return SNAPSHOT, record_key(record)
