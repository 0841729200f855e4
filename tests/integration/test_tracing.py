"""One trace from a client's request to the snapshot that learned from it, in a real collector; and decoding never waits
for it."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from omnidraft import assembly, config
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.errors import ConfigError
from omnidraft.ports import Message, NoopTracing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.telemetry.tracing import TIMEOUT_S, OtelTracing
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.tiny_fleet import LEARNER, Fleet, fleet_settings, running_fleet


@dataclass
class Collector:
    """What came; any thread may look."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is clear no request is answered."""

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert time.monotonic() < deadline, f"have {sorted({span.name for span in self.spans})}"
            time.sleep(0.02)

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.services.add(str(facts(resource.resource.attributes)["service.name"]))
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)


def facts(attributes: list[KeyValue]) -> dict[str, object]:
    """As plain values."""
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


def traceparent(span: Span) -> str:
    return f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"


def links(span: Span) -> set[str]:
    """The spans it links, as traceparents."""
    return {f"00-{link.trace_id.hex()}-{link.span_id.hex()}-01" for link in span.links}


@contextmanager
def collector(*, answers: bool = True) -> Iterator[Collector]:
    """Listens on the loopback interface; one that does not answer lets its clients wait until the end."""
    made = Collector()
    if answers:
        made.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.gate.wait(60)
            made.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00"


@pytest.fixture(scope="module", params=["sqlite", pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.long])])
def traced(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
) -> Iterator[tuple[Fleet, Collector]]:
    """A fleet that learned from a request of CLIENT and put a snapshot of it in place."""
    folder = tmp_path_factory.mktemp("traced")
    log = {"url": f"sqlite:///{folder}/log.db"}
    if request.param == "kafka":
        log = {
            "url": f"kafka://{request.getfixturevalue('kafka_bootstrap')}",
            "topic_prefix": f"traced-{uuid.uuid4().hex[:8]}",
        }
    with pytest.MonkeyPatch.context() as patch, collector() as found:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        settings = fleet_settings(tiny_models, folder, log=log, tracing={"endpoint": found.url})
        with running_fleet(settings, folder) as fleet:
            fleet.ask(headers={"traceparent": CLIENT}).raise_for_status()
            fleet.ask(headers={"traceparent": UNSAMPLED}).raise_for_status()
            fleet.ask_until(lambda: any(links(span) for span in found.named("load snapshot")), 90)
            yield fleet, found


def of_client(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.trace_id.hex() == CLIENT.split("-")[1]]


def only(spans: list[Span]) -> Span:
    (span,) = spans
    return span


def test_a_request_goes_on_from_its_clients_trace(traced: tuple[Fleet, Collector]) -> None:
    _, found = traced
    request = only(of_client(found.named("request")))
    assert request.parent_span_id.hex() == CLIENT.split("-")[2]
    assert request.kind == Span.SPAN_KIND_SERVER
    told = facts(request.attributes)
    assert (told["http.request.method"], told["url.path"]) == ("POST", "/v1/completions")
    assert told["http.response.status_code"] == 200
    assert {"omnidraft-worker", "omnidraft-distiller"} <= found.services
    assert found.paths == {"/v1/traces"}


def test_every_pass_is_a_span_under_its_text_and_lies_within_it(traced: tuple[Fleet, Collector]) -> None:
    fleet, found = traced
    request, text = only(of_client(found.named("request"))), only(of_client(found.named("decode")))
    passes = of_client(found.named("pass"))
    told = facts(text.attributes)
    assert text.parent_span_id == request.span_id
    assert {one.parent_span_id for one in passes} == {text.span_id}
    assert len(passes) == told["omnidraft.passes"]
    assert sum(facts(one.attributes)["gen_ai.usage.output_tokens"] for one in passes) == 24
    assert told["gen_ai.usage.output_tokens"] == 24
    assert told["gen_ai.request.model"] == fleet.settings.models.target
    for one in passes:
        assert text.start_time_unix_nano <= one.start_time_unix_nano + 5e6  # told when it was over
        assert one.end_time_unix_nano <= text.end_time_unix_nano
    assert text.end_time_unix_nano <= request.end_time_unix_nano


def test_the_record_in_the_log_names_its_span(traced: tuple[Fleet, Collector]) -> None:
    fleet, found = traced
    span, text = only(of_client(found.named("trace record"))), only(of_client(found.named("decode")))
    assert (span.parent_span_id, span.kind) == (text.span_id, Span.SPAN_KIND_PRODUCER)
    message, record = logged(fleet, span)
    assert message.headers["traceparent"].decode() == record.traceparent == traceparent(span)
    assert facts(span.attributes)["omnidraft.size_bytes"] > 100


def logged(fleet: Fleet, span: Span) -> tuple[Message, TraceRecord]:
    """The record in the log that this span tells of."""
    reader = assembly.log_reader(fleet.settings, fleet.settings.log.traces_topic)
    messages = reader.poll(1000, 1.0).messages
    reader.close()
    named = facts(span.attributes)["omnidraft.request_id"]
    records = [(each, codec.decode(each.value, each.headers)) for each in messages]
    return next((message, record) for message, record in records if record.request_id == named)


def test_steps_link_their_records_and_snapshots_their_steps(traced: tuple[Fleet, Collector]) -> None:
    fleet, found = traced
    steps = {traceparent(span): span for span in found.named("learning step")}
    linked = set().union(*map(links, steps.values()))
    found.wait_for(lambda: linked <= {traceparent(span) for span in found.named("trace record")})  # another process's
    record = only(of_client(found.named("trace record")))
    is_learned = not is_held_out(logged(fleet, record)[1], LEARNER["held_out_every"])
    assert (traceparent(record) in linked) == is_learned
    for step in steps.values():
        assert 1 <= len(links(step)) <= 2
        assert facts(step.attributes)["omnidraft.records"] == 2
        assert step.kind == Span.SPAN_KIND_CONSUMER
    snapshots = [links(span) for span in found.named("snapshot")]
    known = {traceparent(span) for span in found.named("learning step")}
    assert all(len(each) == 2 and each <= known for each in snapshots)
    assert len(set().union(*snapshots)) == 2 * len(snapshots)  # no step is in two of them


def test_a_worker_that_loads_a_snapshot_links_who_made_it(traced: tuple[Fleet, Collector]) -> None:
    _, found = traced
    loads = [span for span in found.named("load snapshot") if links(span)]
    assert loads
    for load in loads:
        (made_by,) = links(load)
        found.wait_for(lambda made_by=made_by: made_by in map(traceparent, found.named("snapshot")))
        maker = only([span for span in found.named("snapshot") if traceparent(span) == made_by])
        assert facts(maker.attributes)["omnidraft.version"] == facts(load.attributes)["omnidraft.version"]


def test_what_its_client_does_not_keep_is_not_kept_here(traced: tuple[Fleet, Collector]) -> None:
    _, found = traced
    trace_id = bytes.fromhex(UNSAMPLED.split("-")[1])
    assert not [span for span in found.spans if span.trace_id == trace_id]
    assert not any(link.trace_id == trace_id for span in found.spans for link in span.links)


def test_a_collector_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times more spans than the queue holds."""
    monkeypatch.setattr("omnidraft.telemetry.tracing.QUEUE_SPANS", 512)
    with collector(answers=False) as deaf:
        metrics = CountingMetrics()
        tracing = OtelTracing(deaf.url, "test", metrics, timeout_s=1.0)
        started = time.perf_counter()
        for _ in range(5000):
            tracing.begin("pass", parent=CLIENT, drafted=3).end()
        each_s = (time.perf_counter() - started) / 5000
        assert each_s < 0.001
        started = time.perf_counter()
        tracing.close()
        assert time.perf_counter() - started < TIMEOUT_S + 1.0
        assert metrics.value("omnidraft_spans_ended_total") == 5000
        assert metrics.value("omnidraft_spans_exported_total", result="failed") >= 512
        assert not deaf.spans


def test_where_nobody_listens_spans_are_lost_and_counted_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CountingMetrics()
    tracing = OtelTracing("http://127.0.0.1:9", "test", metrics, timeout_s=0.2)
    for _ in range(1200):
        tracing.begin("pass").end()
    tracing.close()
    assert metrics.value("omnidraft_spans_exported_total", result="failed") == 1200
    said = [record for record in caplog.records if record.name == "omnidraft.telemetry.tracing"]
    assert len(said) == 1


def test_off_it_is_nothing_and_without_opentelemetry_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = CountingMetrics()
    off = assembly.tracing(config.Settings(), "worker", metrics)
    assert isinstance(off, NoopTracing)
    assert not off.is_on
    assert off.begin("request", parent=CLIENT, method="POST").context == CLIENT
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http", None)
    on = config.load(None, {}, tracing={"endpoint": "http://127.0.0.1:9"})
    with pytest.raises(ConfigError, match=r"omnidraft\[otel\]"):
        assembly.tracing(on, "worker", metrics)


def test_the_standard_variable_sets_the_endpoint() -> None:
    settings = config.load(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    assert settings.tracing.endpoint == "http://collector:4318"
    with pytest.raises(ConfigError, match="not a collector"):
        config.load(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})
