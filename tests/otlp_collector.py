"""A collector that takes OTLP over HTTP, as collectors do: decodes the protobuf and keeps the spans."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


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
