"""A worker whose target's answers are recorded, so that minutes are enough: it drafts, verifies, records and takes up
snapshots as every worker does, and has no target to run."""

import time
from dataclasses import replace
from functools import partial
from threading import Event

from omnidraft import assembly
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.config import Settings
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.fleet.request_stats import RequestStats, request_stats
from omnidraft.registry.staging import own_folder
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces.record import TraceRecord
from omnidraft.whatif.recorded_target import RecordedTarget
from omnidraft.whatif.recorded_texts import recorded_texts


class RecordedWorker:
    """Serves recorded answers one after the other, all to one tenant."""

    def __init__(self, settings: Settings) -> None:
        """Load the base drafter. Raises ModelError, RegistryError, BusError."""
        self.served: list[RequestStats] = []
        self._settings, metrics, tokenizers = settings, CountingMetrics(), assembly.vocabularies(settings)
        assembly.set_threads(settings)
        self._target = RecordedTarget(len(tokenizers.target.vocabulary))
        writer = partial(assembly.log_writer, settings, settings.log.traces_topic)
        self._producer = TraceProducer(writer, settings.recorder, metrics, self._completed)
        host = DecodingHost(settings, metrics, tokenizers, loaded_target=self._target, producer=self._producer)
        self._engine = host.engine(host.load(None, None))
        self._updater = SnapshotUpdater(
            snapshot_reader(settings),
            self._engine.slot,
            host.load,  # between two answers, so it need not be throttled
            assembly.control_log(settings, metrics),
            settings.worker,
            metrics,
            target=settings.models.target,
            staging=own_folder(),
        )

    def serve(self, record: TraceRecord) -> None:
        """Take up the champion, then draft for an answer until all of it is drawn; return when the log has its
        record."""
        self._updater.step(Event())
        tenant, self._recorded = self._settings.worker.tenant, record
        stop_ids, slot = self._engine.pair.target_tokenizer.stop_ids, self._engine.slot
        (text,), _ = recorded_texts([replace(record, tenant=tenant)], stop_ids)
        num_draft_tokens = slot.rules.limit(tenant, text.work, self._settings.decode.num_draft_tokens)
        self._target.expect(text.request.prompt_ids, text.answer_ids)
        request = GenerationRequest(prompt_ids=text.request.prompt_ids, tenant=tenant, request_id=record.request_id)
        self._engine.add_request(request, decoded=replace(text.request, num_draft_tokens=num_draft_tokens))
        while self._engine.has_work:
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
        while self._producer.num_waiting:
            time.sleep(0.01)

    def _completed(self, record: TraceRecord) -> TraceRecord:
        """Return the record with the log-probabilities that the target had; a recorded one knows its tokens alone."""
        self.served.append(request_stats(record))
        return replace(record, beliefs=self._recorded.beliefs)

    def close(self) -> None:
        """Stop the thread that writes records."""
        self._producer.close()
