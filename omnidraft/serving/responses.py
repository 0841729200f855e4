"""HTTP responses to completion requests, whole or as server-sent events. It runs on the event loop and never blocks."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.errors import RequestError
from omnidraft.ports import Step
from omnidraft.serving import auth, response_schemas
from omnidraft.serving.error_handlers import ModelNotServed, server_error
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_formats import ChoicePart, LogprobCollector, ResponseKind
from omnidraft.serving.structured_output import GrammarScheduler
from omnidraft.serving.tool_calls import reader_of
from omnidraft.traces.trace_context import valid_traceparent

Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target as clients see it."""

    engine: Engine
    fingerprint: str
    """It identifies all that a text depends on besides the request; see ports.Target."""

    @property
    def name(self) -> str:
        return self.engine.pair.target


class Responder:
    """Turns the body of a request into its response."""

    def __init__(self, requests: RequestQueue, served: Sequence[ServedModel], settings: WorkerSettings) -> None:
        self._requests = requests
        self._served = {each.name: each for each in served}
        self._first = served[0].name
        self._settings, self._tenants = settings, auth.TenantNames(settings)
        self._grammars = GrammarScheduler()

    async def __call__(self, request: Request, body: Body, whole: ResponseKind, chunk: ResponseKind) -> Response:
        """Queue a request and return its response.

        Raises:
            RequestError, QueueFull, Stopping, and what decoding raises: error_handlers.py makes them a 4xx or 5xx.
        """
        model = self.model(body.model)
        ready = asyncio.Event()
        queued = self._requests.submit(await self.queued_request(request, body, model, waker(ready)))
        disconnect = asyncio.create_task(self._abandon_on_disconnect(request, queued))
        writer = _ResponseWriter(queued, model, body, chunk if body.stream else whole)
        parts = writer.parts(ready)
        try:
            if not body.stream:
                return Response(await writer.whole(parts), media_type="application/json")
            first = await anext(parts)  # so that a bad request is still a 4xx
        finally:
            disconnect.cancel()
        stream = self._stream(writer, first, parts)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def model(self, name: str | None) -> ServedModel:
        """Return the served model of this name, the first for None. Raises ModelNotServed."""
        model = self._served.get(self._first if name is None else name)
        if model is None:
            names = ", ".join(repr(known) for known in self._served)
            raise ModelNotServed(f"no model {name!r} here; this worker serves {names}")
        return model

    async def queued_request(
        self, request: Request, body: Body, model: ServedModel, wake: Callable[[], None]
    ) -> QueuedRequest:
        """Return the body as a request for the queue, in the name of its client and tenant. Raises RequestError."""
        if body.num_choices > self._settings.max_choices:
            raise RequestError(f"n: {self._settings.max_choices} choices at most, got {body.num_choices}")
        api_client = auth.authenticated_client(request)
        tenant = self._tenants.tenant_of(api_client, body.user)
        client = api_client.name if api_client else _address(request)
        scope = auth.cache_scope(api_client, _address(request), body.cache_salt)
        first, *others = body.generation_requests(tenant, self._settings.max_new_tokens)
        sampling = (await self._grammars.prepare(client, model.engine, first)).sampling
        traceparent = valid_traceparent(request.headers.get("traceparent"))
        generations = [replace(each, sampling=sampling, traceparent=traceparent) for each in (first, *others)]
        return QueuedRequest(model.engine, generations, client=client, cache_scope=scope, wake=wake)

    async def _abandon_on_disconnect(self, request: Request, queued: QueuedRequest) -> None:
        """Abandon the request when its client goes away. The body has been read, so nothing else can come."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._requests.abandon(queued)

    async def _stream(
        self, writer: "_ResponseWriter", first: ChoicePart, parts: AsyncIterator[ChoicePart]
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream. Closing it early, because the client went away, abandons the request."""
        try:
            yield writer.event(first)
            async for part in parts:
                yield writer.event(part)
            if writer.has_final_event:
                yield writer.final_event()
        except Exception as exc:  # the status line is out: all that is left is to say it in the stream
            yield _event(json.dumps(server_error(exc)))
        finally:
            self._requests.abandon(writer.queued)
        yield b"data: [DONE]\n\n"


class _ResponseWriter:
    """Formats the response to one request from its steps."""

    def __init__(self, queued: QueuedRequest, model: ServedModel, body: Body, kind: ResponseKind) -> None:
        self.queued = queued
        self._model, self._body, self._kind = model, body, kind
        self._vocabulary = model.engine.pair.target_tokenizer.vocabulary
        self._created = int(time.time())
        self._head: str | None = None

    async def parts(self, ready: asyncio.Event) -> AsyncIterator[ChoicePart]:
        """Yield every step that has something to show. Raises what decoding raised."""
        logprobs = [self._logprobs() for _ in self.queued.texts]
        form = self._model.engine.pair.tool_format
        readers = [reader_of(text.request, form) for text in self.queued.texts]
        begun: set[int] = set()
        async for index, step in _steps(self.queued, ready):
            part = ChoicePart(index, index not in begun, step.text)
            if step.finish_reason is not None:
                part.finish_reason = step.finish_reason.value
            collector = logprobs[index]
            part.entries = None if collector is None else collector.take(step)
            if (reader := readers[index]) is not None:
                reader.read(part)
            if part.text or part.finish_reason or part.entries or part.calls:
                begun.add(index)
                yield part

    async def whole(self, parts: AsyncIterator[ChoicePart]) -> bytes:
        """Return the body of a response that is not streamed."""
        choices = [ChoicePart(index, True) for index in range(len(self.queued.texts))]
        async for part in parts:
            choices[part.index].add(part)
        shown = [self._kind.choice(choice, self._vocabulary) for choice in choices]
        dumped = ",".join(choice.model_dump_json(exclude_unset=True) for choice in shown)
        tail = {"usage": self._usage()} | self._stats()
        return f"{self._frame()}[{dumped}],{json.dumps(tail)[1:]}".encode()

    def event(self, part: ChoicePart) -> bytes:
        """Return one chunk of a stream."""
        choice = self._kind.choice(part, self._vocabulary).model_dump_json(exclude_unset=True)
        usage = ',"usage":null' if self._body.wants_usage else ""
        if self._body.wants_continuous_usage:
            usage = f',"usage":{json.dumps(self._usage())}'
        return _event(f"{self._frame()}[{choice}]{usage}}}")

    @property
    def has_final_event(self) -> bool:
        return self._body.wants_usage or self._body.figures

    def final_event(self) -> bytes:
        """Return the chunk without choices."""
        tail = ({"usage": self._usage()} if self._body.wants_usage else {}) | self._stats()
        return _event(f"{self._frame()}[],{json.dumps(tail)[1:]}")

    def _logprobs(self) -> LogprobCollector | None:
        return None if self._body.num_log_probs is None else LogprobCollector(self._vocabulary)

    def _frame(self) -> str:
        """Return the JSON before the choices, which is the same in every chunk."""
        if self._head is None:
            generation = self.queued.texts[0].generation
            assert generation is not None  # a step has come
            frame = {
                "id": self._kind.prefix + self.queued.request_id,
                "object": self._kind.name,
                "created": self._created,
                "model": self._model.name,
                "system_fingerprint": f"{generation.snapshot.snapshot_id}/{self._model.fingerprint}",
            }
            self._head = json.dumps(frame)[:-1] + ',"choices":'
        return self._head

    def _usage(self) -> dict[str, int]:
        texts, num_per_prompt = self.queued.texts, self._body.n or 1
        prompts = [text.generation for text in texts[::num_per_prompt] if text.generation]
        num_prompt = sum(each.num_prompt_tokens for each in prompts)
        num_completion = sum(text.stats.num_tokens for text in texts)
        num_cached = sum(each.num_cached_tokens for each in prompts)
        return response_schemas.Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=response_schemas.PromptTokensDetails(cached_tokens=num_cached),
        ).model_dump()

    def _stats(self) -> dict[str, object]:
        if not self._body.figures:
            return {}
        generations = [text.generation for text in self.queued.texts if text.generation]
        origin = {"snapshot_version": generations[0].snapshot.version, "seeds": [each.seed for each in generations]}
        return {"omnidraft": self.queued.stats.summary() | origin}


async def _steps(queued: QueuedRequest, ready: asyncio.Event) -> AsyncIterator[tuple[int, Step]]:
    while True:
        await ready.wait()
        ready.clear()
        for step in queued.ready_steps():
            if step is None:
                return
            yield step


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


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
