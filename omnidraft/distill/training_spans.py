"""The spans of learning: a step links the records it learned from, a snapshot links the steps it was made of."""

from omnidraft.distill.ingest.batcher import Batch
from omnidraft.ports import Span, Tracing


class LearningSpans:
    """The spans of one distiller."""

    def __init__(self, tracing: Tracing, target: str) -> None:
        self._tracing, self._target = tracing, target
        self._steps: list[str] = []  # since the newest snapshot

    def step(self, batch: Batch, number: int) -> Span:
        """Begin the span of a step."""
        links = dict.fromkeys(record.traceparent for record in batch.records if record.traceparent)
        span = self._tracing.begin(
            "learning step", links=list(links), model=self._target, number=number, records=len(batch.records)
        )
        if span.context:
            self._steps.append(span.context)
        return span

    def snapshot(self) -> Span:
        """Begin the span of a snapshot, which links all steps since the last one."""
        steps, self._steps = self._steps, []
        return self._tracing.begin("snapshot", links=steps, model=self._target, steps=len(steps))
