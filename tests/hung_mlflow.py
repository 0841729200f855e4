"""An MLflow server without models that may hang: it takes connections and answers nothing, like a stopped process."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


class HungMlflow(ThreadingHTTPServer):
    """Answers until `hangs` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hangs, self.is_over = Event(), Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HungMlflow

    def do_GET(self) -> None:
        if self.server.hangs.is_set():
            self.server.is_over.wait()
            return
        is_search = "/search" in self.path
        body = b"{}" if is_search else b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}'
        self.send_response(200 if is_search else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args: object) -> None: ...


@contextmanager
def hung_mlflow() -> Iterator[HungMlflow]:
    """A server that answers at first."""
    with HungMlflow() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()
