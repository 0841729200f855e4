"""From a client's body to its answer, whole or as server-sent events. Runs on the event loop and never blocks it."""

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
from omnidraft.serving.error_handlers import ModelNotServed, error
from omnidraft.serving.logprob_format import LogprobEntries
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_formats import Piece, ResponseKind
from omnidraft.serving.structured_output import GrammarTurns
from omnidraft.traces.trace_context import accepted

Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target as clients see it."""

    engine: Engine
    fingerprint: str
    """Names all that a text depends on besides the request; see ports.Target."""

    @property
    def name(self) -> str:
        return self.engine.pair.target


class Responder:
    """Answers one body."""

    def __init__(self, requests: RequestQueue, served: Sequence[ServedModel], settings: WorkerSettings) -> None:
        self._requests = requests
        self._served = {each.name: each for each in served}
        self._first = served[0].name
        self._settings = settings
        self._turns = GrammarTurns()

    async def __call__(self, request: Request, body: Body, whole: ResponseKind, chunk: ResponseKind) -> Response:
        """Raises what is a 4xx or 5xx: RequestError, QueueFull, Stopping, and what decoding raises."""
        model = self._requested(body.model)
        ready = asyncio.Event()
        ticket = self._requests.submit(await self._ticket(request, body, model, _waker(ready)))
        gone = asyncio.create_task(self._give_up_with_client(request, ticket))
        answer = _Answer(ticket, model, body, chunk if body.stream else whole)
        pieces = answer.pieces(ready)
        try:
            if not body.stream:
                return Response(await answer.whole(pieces), media_type="application/json")
            first = await anext(pieces)  # so that a bad request is still a 4xx
        finally:
            gone.cancel()
        stream = self._stream(answer, first, pieces)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def _requested(self, name: str | None) -> ServedModel:
        model = self._served.get(self._first if name is None else name)
        if model is None:
            names = ", ".join(repr(known) for known in self._served)
            raise ModelNotServed(f"no model {name!r} here; this worker serves {names}")
        return model

    async def _ticket(
        self, request: Request, body: Body, model: ServedModel, wake: Callable[[], None]
    ) -> QueuedRequest:
        if body.num_choices > self._settings.max_choices:
            raise RequestError(f"n: {self._settings.max_choices} choices at most, got {body.num_choices}")
        caller = auth.caller(request)
        tenant = (caller and caller.tenant) or body.user or self._settings.tenant
        payer = caller.name if caller else tenant
        first, *others = body.questions(tenant, self._settings.max_new_tokens)
        sampling = (await self._turns.prepared(payer, model.engine, first)).sampling
        traceparent = accepted(request.headers.get("traceparent"))
        questions = [replace(each, sampling=sampling, traceparent=traceparent) for each in (first, *others)]
        return QueuedRequest(model.engine, questions, payer=payer, wake=wake)

    async def _give_up_with_client(self, request: Request, ticket: QueuedRequest) -> None:
        """Wait until the client goes away, then give its ticket up. The body has been read, nothing else can come."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._requests.give_up(ticket)

    async def _stream(self, answer: "_Answer", first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """Closed early, because the client went away, it gives the request up."""
        try:
            yield answer.event(first)
            async for piece in pieces:
                yield answer.event(piece)
            if answer.has_final_event:
                yield answer.final_event()
        except Exception as exc:  # the status line is out: all that is left is to say it in the stream
            yield _event(json.dumps(error(str(exc), "server_error")))
        finally:
            self._requests.give_up(answer.ticket)
        yield b"data: [DONE]\n\n"


class _Answer:
    """One request's answer, as its steps come."""

    def __init__(self, ticket: QueuedRequest, model: ServedModel, body: Body, kind: ResponseKind) -> None:
        self.ticket = ticket
        self._model, self._body, self._kind = model, body, kind
        self._vocabulary = model.engine.pair.target_tokenizer.vocabulary
        self._created = int(time.time())
        self._head: str | None = None

    async def pieces(self, ready: asyncio.Event) -> AsyncIterator[Piece]:
        """What is worth an event. Raises what decoding raised."""
        index, is_first, entries = 0, True, self._entries()
        async for number, step in _steps(self.ticket, ready):
            if number != index:
                index, is_first, entries = number, True, self._entries()
            piece = Piece(index, is_first, step.text)
            if step.finish_reason is not None:
                piece.finish_reason = step.finish_reason.value
            piece.entries = None if entries is None else entries.take(step)
            if not (piece.text or piece.finish_reason or piece.entries):
                continue
            is_first = False
            yield piece

    async def whole(self, pieces: AsyncIterator[Piece]) -> bytes:
        """The body of a response."""
        choices = [Piece(index, True) for index in range(len(self.ticket.texts))]
        async for piece in pieces:
            choice = choices[piece.index]
            choice.text += piece.text
            choice.finish_reason = piece.finish_reason
            if piece.entries is not None:
                choice.entries = (choice.entries or []) + piece.entries
        said = ",".join(self._kind.choice(choice, self._vocabulary).model_dump_json() for choice in choices)
        tail = {"usage": self._usage()} | self._figures()
        return f"{self._frame()}[{said}],{json.dumps(tail)[1:]}".encode()

    def event(self, piece: Piece) -> bytes:
        """One chunk of a stream."""
        said = self._kind.choice(piece, self._vocabulary).model_dump_json(exclude_unset=True)
        usage = ',"usage":null' if self._body.wants_usage else ""
        return _event(f"{self._frame()}[{said}]{usage}}}")

    @property
    def has_final_event(self) -> bool:
        return self._body.wants_usage or self._body.figures

    def final_event(self) -> bytes:
        """The chunk without choices, when it was asked for."""
        tail = ({"usage": self._usage()} if self._body.wants_usage else {}) | self._figures()
        return _event(f"{self._frame()}[],{json.dumps(tail)[1:]}")

    def _entries(self) -> LogprobEntries | None:
        return None if self._body.num_log_probs is None else LogprobEntries(self._vocabulary)

    def _frame(self) -> str:
        """All that stands before the choices; the same in every chunk."""
        if self._head is None:
            answer = self.ticket.texts[0].answer
            assert answer is not None  # a step has come
            frame = {
                "id": self._kind.prefix + self.ticket.request_id,
                "object": self._kind.name,
                "created": self._created,
                "model": self._model.name,
                "system_fingerprint": f"{answer.snapshot.snapshot_id}/{self._model.fingerprint}",
            }
            self._head = json.dumps(frame)[:-1] + ',"choices":'
        return self._head

    def _usage(self) -> dict[str, int]:
        texts, num_per_prompt = self.ticket.texts, self._body.n or 1
        num_prompt = sum(text.answer.num_prompt_tokens for text in texts[::num_per_prompt] if text.answer)
        num_said = sum(text.figures.num_tokens for text in texts)
        return response_schemas.Usage(
            prompt_tokens=num_prompt, completion_tokens=num_said, total_tokens=num_prompt + num_said
        ).model_dump()

    def _figures(self) -> dict[str, object]:
        if not self._body.figures:
            return {}
        answers = [text.answer for text in self.ticket.texts if text.answer]
        about = {"snapshot_version": answers[0].snapshot.version, "seeds": [answer.seed for answer in answers]}
        return {"omnidraft": self.ticket.figures.summary() | about}


async def _steps(ticket: QueuedRequest, ready: asyncio.Event) -> AsyncIterator[tuple[int, Step]]:
    while True:
        await ready.wait()
        ready.clear()
        for arrived in ticket.arrived():
            if arrived is None:
                return
            yield arrived


def _waker(ready: asyncio.Event) -> Callable[[], None]:
    """For the decoding thread. After the loop's end nobody is left to be told."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:  # the server has stopped
            if not loop.is_closed():
                raise

    return wake


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
