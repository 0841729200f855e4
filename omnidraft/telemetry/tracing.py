"""ports.Tracing over OpenTelemetry: spans in batches to a collector, OTLP over HTTP.

Nothing here is global: another library's OpenTelemetry in the same process is unaffected. Ending a span puts it into a
bounded queue, which a thread of the SDK empties; spans that no collector takes within TIMEOUT_S are lost and counted.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from omnidraft import __version__
from omnidraft.ports import Metrics
from omnidraft.traces.trace_context import is_sampled, valid_traceparent

logger = logging.getLogger(__name__)

PATH = "/v1/traces"
BATCH_SPANS = 512
QUEUE_SPANS = 8192
"""Spans that may wait for the collector, 16 batches of them; a full queue drops the oldest."""
TIMEOUT_S = 5.0
"""The time that a collector has for one batch, and for the last ones when the process stops."""
DELAY_MS = 1000
"""The longest time that a span waits for its batch to fill."""
ENDED = "omnidraft_spans_ended_total"
EXPORTED = "omnidraft_spans_exported_total"

_KINDS = {
    "request": trace.SpanKind.SERVER,
    "trace record": trace.SpanKind.PRODUCER,
    "learning step": trace.SpanKind.CONSUMER,
}
"""Kinds by the name of the span; all others are internal."""


class OtelTracing:
    """Spans of one process."""

    is_on = True

    def __init__(self, endpoint: str, service: str, metrics: Metrics, timeout_s: float = TIMEOUT_S) -> None:
        """`service` names this process to the collector, which has `timeout_s` for each batch."""
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + PATH, timeout=timeout_s)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _CountingExporter(exporter, metrics),
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=DELAY_MS,
                max_export_batch_size=BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("omnidraft", __version__)
        self._metrics = metrics

    def begin(
        self,
        name: str,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
        ago_s: float = 0.0,
        **facts: str | float | bool,
    ) -> "OtelSpan":
        """Begin a span, see ports.Tracing. Links to spans that were not sampled are left out."""
        remote = _context(parent)
        span = self._tracer.start_span(
            name,
            Context() if remote is None else trace.set_span_in_context(trace.NonRecordingSpan(remote), Context()),
            kind=_KINDS.get(name, trace.SpanKind.INTERNAL),
            attributes=_attributes(facts),
            links=[trace.Link(one) for link in links if is_sampled(link) and (one := _context(link)) is not None],
            start_time=time.time_ns() - int(ago_s * 1e9),
        )
        return OtelSpan(span, self._metrics)

    def close(self) -> None:
        """Send the last spans, see ports.Tracing; the SDK alone would wait for 30 s."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(TIMEOUT_S)
        if closing.is_alive():
            logger.warning("the collector did not take the last spans within %.1f s", TIMEOUT_S)


class OtelSpan:
    """An OpenTelemetry span behind ports.Span."""

    def __init__(self, span: trace.Span, metrics: Metrics) -> None:
        self._span, self._metrics = span, metrics

    @property
    def context(self) -> str | None:
        context = self._span.get_span_context()
        if not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def end(self, **facts: str | float | bool) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(_attributes(facts))
        if "error" in facts:
            self._span.set_status(trace.StatusCode.ERROR, str(facts["error"]))
        self._span.end()
        self._metrics.add(ENDED)


class _CountingExporter(SpanExporter):
    """Wraps an exporter; an outage is one warning in the log, and its spans are counted."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics) -> None:
        self._exporter, self._metrics = exporter, metrics
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        self._metrics.add(EXPORTED, len(spans), result="failed" if has_failed else "ok")
        if has_failed and not self._is_failing:
            logger.warning("the collector does not take spans; they are lost until it does")
        self._is_failing = has_failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(traceparent: str | None) -> trace.SpanContext | None:
    """Parse a traceparent; None if it is invalid."""
    if valid_traceparent(traceparent) is None or traceparent is None:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)))


def _attributes(facts: Mapping[str, str | float | bool]) -> dict[str, str | float | bool]:
    """Return facts under OpenTelemetry's names where it has one, else under `omnidraft.`."""
    return {_SEMANTIC_CONVENTIONS.get(name, f"omnidraft.{name}"): value for name, value in facts.items()}


_SEMANTIC_CONVENTIONS = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "topic": "messaging.destination.name",
    "error": "error.type",
}
"""Our name of a fact -> that of OpenTelemetry's semantic conventions."""
