"""HTTP responses to completion requests, whole or as server-sent events. It runs on the event loop and never blocks."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.receipt import require_signer
from omnidraft.errors import RequestError
from omnidraft.params import Sampling
from omnidraft.serving import auth
from omnidraft.serving.answer import Answer, Body, ServedModel
from omnidraft.serving.error_handlers import REQUEST_ID, REQUEST_ID_HEADERS, FieldRefused
from omnidraft.serving.event_stream import QUEUED, EventStream
from omnidraft.serving.fair_queue import FairTurns
from omnidraft.serving.queued_request import Abandoned, QueuedRequest, QueueFull
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.response_formats import ChoicePart
from omnidraft.traces.trace_context import valid_traceparent

__all__ = ["Responder", "ResponseWriter", "ServedModel", "waker"]

MAX_CHOICES = 128
"""Texts of one request: `n` times its prompts. They are decoded side by side, all in one scheduler."""


class ResponseWriter(Protocol):
    """Writes one answer in the format of its protocol."""

    def whole(self, parts: Sequence[ChoicePart]) -> bytes:
        """Return the body of a response that is not streamed, given all parts of it."""

    def events(self, part: ChoicePart) -> bytes:
        """Return the events of a stream that tell one part."""

    def ping(self) -> bytes:
        """Return what says that a silent stream is alive."""

    def last_events(self) -> bytes:
        """Return the events that end a stream after the last part."""

    def error_events(self, exc: Exception) -> bytes:
        """Return the events that end a stream because decoding raised."""


class Responder:
    """Turns the body of a request into its response."""

    def __init__(self, requests: RequestQueue, served: Sequence[ServedModel], settings: WorkerSettings) -> None:
        self._requests = requests
        self._served = {each.name: each for each in served}
        self._first = served[0].name
        self._settings, self._tenants = settings, auth.TenantNames(settings)
        self._grammars, self._prompts = FairTurns(), FairTurns()
        self._num_tokenizing = Counter[str]()
        """Requests of each client whose prompts are tokenized, or wait for it."""

    async def __call__(self, request: Request, body: Body, writer_of: Callable[[Answer], ResponseWriter]) -> Response:
        """Queue a request and return its response.

        Raises:
            RequestError, QueueFull, Stopping, and what decoding raises: error_handlers.py makes them a 4xx or 5xx.
        """
        model, ready = self.model(body.model), asyncio.Event()
        queued = await self.queued_request(request, body, model, wake=waker(ready))
        answer = Answer(queued, model, body, int(time.time()))
        writer, parts = writer_of(answer), answer.parts(ready)
        headers = dict.fromkeys(REQUEST_ID_HEADERS, queued.request_id)
        async with self.watched(request, queued):
            await self.submit(queued)
            is_long = body.prompt_logprobs is not None or body.num_log_probs is not None  # seconds, not milliseconds
            if body.stream:
                events = _events(writer, parts, is_long=is_long)
                return EventStream(events, headers, partial(self._requests.abandon, queued), writer.ping)
            whole = partial(writer.whole, [part async for part in parts])
            content = await asyncio.to_thread(whole) if is_long else whole()
        return Response(content, media_type="application/json", headers=headers)

    def model(self, name: str | None) -> ServedModel:
        """Return the served model of this name, the first for None. Raises FieldRefused."""
        aliases = self._settings.model_aliases
        known = name if name is None or name in self._served else aliases.get(name, aliases.get("*", name))
        model = self._served.get(self._first if known is None else known)
        if model is None:
            names = ", ".join(repr(known) for known in self._served)
            message = f"no model {name!r} here; this worker serves {names}"
            raise FieldRefused(message, status=404, field="model", code="model_not_found")
        return model

    def client_of(self, request: Request) -> str:
        """Return the client that waits in line for others: the key's, or the address."""
        api_client = auth.authenticated_client(request)
        return api_client.name if api_client else _address(request)

    def tenant_of(self, request: Request, body: Body) -> str:
        """Return the tenant of a request. Raises RequestError."""
        return self._tenants.tenant_of(auth.authenticated_client(request), body.user)

    async def queued_request(
        self,
        request: Request,
        body: Body,
        model: ServedModel,
        *,
        wake: Callable[[], None],
        note: Callable[[], None] = lambda: None,
    ) -> QueuedRequest:
        """Return the body as a request for the queue, in the name of its client and tenant. Raises RequestError."""
        self._require_few_choices(body)
        if body.receipt:
            require_signer(model.receipts)
        client = self.client_of(request)
        scope = auth.cache_scope(auth.authenticated_client(request), _address(request), body.cache_salt)
        tenant = self.tenant_of(request, body)
        defaults = model.engine.pair.target_tokenizer.sampling_defaults
        first, *others = body.generation_requests(tenant, self._settings.max_new_tokens, defaults)
        setattr(request.state, REQUEST_ID, first.request_id)  # also of an error's answer
        sampling = await self._prepared_sampling(first, model.engine, client, scope)
        traceparent = valid_traceparent(request.headers.get("traceparent"))
        generations = [replace(each, sampling=sampling, traceparent=traceparent) for each in (first, *others)]
        owner: dict[str, Any] = {"client": client, "cache_scope": scope, "priority": body.priority}
        return QueuedRequest(model.engine, generations, **owner, note=note, wake=wake)

    async def _prepared_sampling(self, first: GenerationRequest, engine: Engine, client: str, scope: str) -> Sampling:
        """Return the sampling with its grammar compiled: one at a time, beside the event loop and beside decoding, and
        clients take turns. Raises RequestError."""
        if first.sampling.grammar is None and first.tools is None:
            return first.sampling
        prepare = partial(engine.prepare, first, client=client, cache_scope=scope)
        return (await self._grammars.run(client, prepare)).sampling

    async def submit(self, queued: QueuedRequest) -> None:
        """Tokenize the prompts of a request, and add it to the queue. Raises RequestError, QueueFull, Stopping, and
        Abandoned where its client went away meanwhile."""
        try:
            self._requests.require_open()
            await self._tokenize(queued)
            if queued.is_abandoned:
                raise Abandoned("the client went away before its turn")
        except Exception as exc:
            self._requests.count(queued, exc)
            raise
        self._requests.submit(queued)

    async def _tokenize(self, queued: QueuedRequest) -> None:
        """Turn the request into ids when it is its client's turn, of whose requests twice as many may wait for that as
        the queue holds. Raises RequestError, QueueFull."""
        client, most = queued.client, 2 * self._settings.max_queue
        if self._num_tokenizing[client] >= most:
            raise QueueFull(f"{most} prompts of yours wait to be tokenized already; try again later", 1)
        self._num_tokenizing[client] += 1
        try:
            num_bytes = queued.num_prompt_bytes
            await self._prompts.run(client, lambda: None if queued.is_abandoned else queued.tokenize(), num_bytes)
        finally:
            self._num_tokenizing -= Counter([client])

    def _require_few_choices(self, body: Body) -> None:
        """Raises RequestError for more texts than a request may ask for."""
        if body.num_choices > MAX_CHOICES:
            field = "n" if len(body.prompts()) == 1 else "prompt"
            numbers = f"{MAX_CHOICES} choices at most (prompts times n), got {body.num_choices}"
            raise RequestError(f"{field}: {numbers}")

    @asynccontextmanager
    async def watched(self, request: Request, queued: QueuedRequest) -> AsyncIterator[None]:
        """Inside, the request is abandoned when its client goes away. Its body has been read, so nothing else can
        come."""

        async def abandon_on_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._requests.abandon(queued)

        watch = asyncio.create_task(abandon_on_disconnect())
        try:
            yield
        finally:
            watch.cancel()


async def _events(writer: ResponseWriter, parts: AsyncIterator[ChoicePart], *, is_long: bool) -> AsyncIterator[bytes]:
    """Yield the events of a stream, whose first part is long where it has the log-probabilities of a whole prompt."""
    try:
        yield QUEUED
        async for part in parts:
            is_slow = is_long and part.is_first
            yield await asyncio.to_thread(writer.events, part) if is_slow else writer.events(part)
        last = writer.last_events()
    except Exception as exc:  # the status line is out: all that is left is to say it in the stream
        last = writer.error_events(exc)
    yield last


def waker(ready: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets the event from the decoding thread; it does nothing once the loop is closed."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:  # the server has stopped
            if not loop.is_closed():
                raise

    return wake


def _address(request: Request) -> str:
    """Return the client's address, which stands for the client where there are no keys."""
    return request.client.host if request.client is not None else "unknown"
