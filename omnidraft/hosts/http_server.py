"""The worker's HTTP server: uvicorn with h11, and bounds on what one connection, and all of them, may take.

The application bounds bodies (serving/error_handlers.py); this module bounds connections, URLs, headers and times, and
answers to no name that is not allowed. A refusal has the shape of OpenAI's errors. The rest of a refused request is
read and discarded for a moment, so that a client that still sends can read the refusal.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from omnidraft.allowed_hosts import MISDIRECTED, is_allowed
from omnidraft.config import WorkerSettings
from omnidraft.serving.response_schemas import error

LAST_BYTES_S = 3
"""The time clients have to read the end of their responses when the server stops."""
LINGER_S = 2.0
"""The time for which data from a refused client is discarded."""
BUSY_LINGER_S = 0.2
"""The same for a connection beyond the limit."""
MAX_URL_BYTES = 8_192
"""Longer URLs get 414; the API's own have a tenth of it."""
MAX_HEADER_BYTES = 32_768
"""Larger headers, which include the URL, get 431, before any other check: room for a proxy's own and long tokens."""
RETRY_AFTER_S = "5"
PIECE_BYTES = 4_096
"""h11 gets this much at a time, since it bounds only what it has not read to the end: headers, extensions of a chunk,
trailers."""


@dataclass(frozen=True)
class Deadlines:
    """Keeps half-sent requests and clients that read nothing from holding connections for good."""

    headers_s: float = 10.0
    """From the first byte to the end of a request's headers; then 408."""
    body_s: float = 30.0
    """From the end of the headers to the end of the body; then 408."""
    write_s: float = 60.0
    """The time for which a client may read nothing of its response; then its request is cancelled."""


def http_server(app: ASGIApp, settings: WorkerSettings, deadlines: Deadlines | None = None) -> uvicorn.Server:
    """Return a server that is not running yet. Its log lines are written as ours."""
    return uvicorn.Server(_Config(app, settings, deadlines or Deadlines()))


class _Config(uvicorn.Config):
    """uvicorn's settings, and our limits for the protocol."""

    def __init__(self, app: ASGIApp, limits: WorkerSettings, deadlines: Deadlines) -> None:
        super().__init__(
            app,
            http=BoundedProtocol,
            ws="none",
            proxy_headers=False,  # or a client behind a proxy that lets them through chooses who it is
            log_level="warning",
            log_config=None,
            timeout_keep_alive=limits.idle_timeout_s,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        self.limits, self.deadlines = limits, deadlines


class BoundedProtocol(H11Protocol):
    """One connection."""

    config: _Config
    conn: "_BoundedConnection"

    def __init__(self, config: _Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limits, self._deadlines = config.limits, config.deadlines
        self.conn = _BoundedConnection(config.limits, self._on_event)
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None
        """The deadline of the headers or body being received, or of a connection that is closing."""
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        same = [each for each in self.connections if _address(each) == _address(self)]
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "too many connections; try again later", BUSY_LINGER_S)
        elif len(same) > self._limits.max_connections_per_address:
            self._refuse(429, "too many connections from one address; try again later", BUSY_LINGER_S)
        else:
            self._set_deadline(self._deadlines.headers_s, self._time_out)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        for start in range(0, len(data), PIECE_BYTES):
            if self._is_refused:
                return
            if self.conn.their_state is h11.IDLE and self._deadline is None:
                self._set_deadline(self._deadlines.headers_s, self._time_out)
            super().data_received(data[start : start + PIECE_BYTES])

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._clear_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client reads too slowly."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._deadlines.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_deadline(self._deadlines.write_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """See H11Protocol. Closing waits for the client to read its data, at most `write_s`."""
        super().timeout_keep_alive_handler()
        self._set_deadline(self._deadlines.write_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """See H11Protocol, which calls this where h11 refuses the input."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        reasons = {
            421: MISDIRECTED,
            414: f"the URL may have {MAX_URL_BYTES} bytes at most",
            431: f"the headers may have {MAX_HEADER_BYTES} bytes at most",
        }
        self._refuse(status, reasons.get(status, msg))

    def _time_out(self) -> None:
        """Refuse: the deadline of headers or body has passed. A client that sent nothing gets no response."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()
        else:
            self._refuse(408, "the request took too long to come")

    def _refuse(self, status: int, message: str, linger_s: float = LINGER_S) -> None:
        """Respond with the refusal, unless a response has begun, and close. The application sees a disconnect."""
        self._is_refused = True
        self.connections.discard(self)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._set_deadline(linger_s, self.transport.abort)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        for event in _response(status, message):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()

    def _on_event(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> None:
        """Handle the end of headers or of a body."""
        if isinstance(event, h11.Request):
            self._set_deadline(self._deadlines.body_s, self._time_out)
        elif isinstance(event, h11.EndOfMessage):
            self._clear_deadline()

    def _set_deadline(self, timeout_s: float, callback: Callable[[], object]) -> None:
        """Set the deadline, replacing the one before."""
        self._clear_deadline()
        self._deadline = self.loop.call_later(timeout_s, callback)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _BoundedConnection(h11.Connection):
    """h11 bounds incomplete headers only; this class also bounds URLs and whole headers, and checks the host."""

    def __init__(self, limits: WorkerSettings, on_event: Callable[[Any], None]) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._limits = limits
        self._on_event = on_event

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11.Connection."""
        is_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as exc:
            if exc.error_status_hint == 431 and is_head and b"\n" not in self.trailing_data[0]:
                raise h11.RemoteProtocolError("URL too long", error_status_hint=414) from exc
            raise
        self._on_event(event)
        if isinstance(event, h11.Request):
            self._check(event)
        return event

    def _check(self, request: h11.Request) -> None:
        """Raises RemoteProtocolError."""
        if len(request.target) > MAX_URL_BYTES:
            raise h11.RemoteProtocolError("URL too long", error_status_hint=414)
        num_bytes = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if num_bytes > MAX_HEADER_BYTES:
            raise h11.RemoteProtocolError("headers too long", error_status_hint=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            raise h11.RemoteProtocolError("two lengths")  # a proxy in front may have used the other one
        host = next((value.decode("latin-1") for name, value in request.headers if name == b"host"), None)
        if not is_allowed(host, (*self._limits.allowed_hosts, self._limits.host.lower())):
            raise h11.RemoteProtocolError(MISDIRECTED, error_status_hint=421)


def _address(connection: asyncio.Protocol) -> str | None:
    client: tuple[str, int] | None = getattr(connection, "client", None)
    return client and client[0]


def _response(status: int, message: str) -> tuple[h11.Event, ...]:
    kind = {429: "rate_limit_error", 503: "server_error"}.get(status, "invalid_request_error")
    body = json.dumps(error(message, kind)).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    if status in (429, 503):
        headers.append(("retry-after", RETRY_AFTER_S))
    response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
    return response, h11.Data(data=body), h11.EndOfMessage()
