"""Steps and measurements of a learner, with the records that they use noted in the crash journal first."""

from collections.abc import Mapping

from torch import Tensor

from omnidraft.distill.evaluation.held_out import HeldOut, HeldOutMeasurement
from omnidraft.distill.ingest.batcher import Batch, Batcher
from omnidraft.distill.ingest.crash_journal import CrashJournal
from omnidraft.distill.ingest.trace_consumer import PartitionOffset
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.training.learner import Learner
from omnidraft.distill.training.step_report import StepReport


class JournaledLearning:
    """Learns from batches and measures held-out records. One thread."""

    def __init__(
        self,
        learner: Learner,
        batcher: Batcher,
        held_out: HeldOut,
        journal: CrashJournal,
        memory: TextMemory | None = None,
    ) -> None:
        """`memory` gets the records of every step; None: nothing remembers them."""
        self._learner, self._batcher, self._held_out, self._journal = learner, batcher, held_out, journal
        self._memory = memory
        self._unmeasured: list[PartitionOffset] = []
        """Positions of records that were held out since the last measurement."""

    def prepare(self, batch: Batch) -> None:
        """Try each suspect of the batch alone, and note what is held out. Called before `step`."""
        held_out = {(partition, offset): record for partition, offset, record in batch.held_out}
        records = dict(zip(batch.positions, batch.records, strict=True)) | held_out
        for position in self._journal.suspects(records):
            self._journal.start([position], alone=True)
            self._learner.dry_run(records[position])
            self._journal.finish()
        self._unmeasured += held_out

    def step(self, batch: Batch) -> StepReport:
        """Learn from the batch."""
        self._journal.start(batch.positions)
        report = self._learner.step(batch.records)
        self._journal.finish()
        if self._memory is not None:
            self._memory.add(batch.records)
        return report

    def measure(self, serving: Mapping[str, Tensor]) -> HeldOutMeasurement:
        """Measure the agreement of these serving tensors on the held-out records."""
        self._journal.start(self._unmeasured)
        measured = self._held_out.measure(self._batcher.held_out, serving)
        self._journal.finish()
        self._unmeasured.clear()
        return measured
