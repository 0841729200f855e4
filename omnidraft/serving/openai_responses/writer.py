"""Writes answers as responses of OpenAI's, whole or as the events of their streams.

A stream is response.created, response.in_progress, for each item output_item.added to output_item.done with what is
between, and response.completed, incomplete or failed. Every event carries its number.
Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic_core import to_json

from omnidraft.serving.answer import Answer
from omnidraft.serving.blocks import Block, BlockBuilder, BlockChange, BlockEvent, blocks_of
from omnidraft.serving.error_handlers import told
from omnidraft.serving.event_stream import PING, RESPONSES_PATH, failed_response_event, response_event
from omnidraft.serving.openai_responses.request_schemas import ResponsesRequest
from omnidraft.serving.response_formats import ChoicePart
from omnidraft.serving.response_schemas import Json, generation_responses
from omnidraft.serving.responses import Responder

Event = tuple[str, Json]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesWriter:
    """Writes one answer; see responses.ResponseWriter."""

    def __init__(self, answer: Answer, request: ResponsesRequest) -> None:
        self._answer, self._request = answer, request
        self._blocks = BlockBuilder()
        self._last: ChoicePart | None = None
        self._num_events = 0

    def whole(self, parts: Sequence[ChoicePart]) -> bytes:
        return to_json(self._ended(parts[-1], blocks_of(parts)))

    def events(self, part: ChoicePart) -> bytes:
        events = self._begun()
        self._last = part
        for change in self._blocks.take(part):
            events += self._block_events(change, "completed")  # a block that ends here is followed by another one
        return self._written(events)

    def ping(self) -> bytes:
        """Return an event while nothing is drawn: Codex gives up a stream that has comments alone."""
        if self._last is not None:
            return PING
        in_progress = ("response.in_progress", {"response": self._response("in_progress", [])})
        return self._written(self._begun() or [in_progress])

    def last_events(self) -> bytes:
        assert self._last is not None  # every answer has a part, at least its end
        status = _status(self._last)
        ended = [each for event in self._blocks.finish() for each in self._block_events(event, status)]
        response = self._ended(self._last, self._blocks.blocks)
        return self._written([*ended, (f"response.{status}", {"response": response})])

    def error_events(self, exc: Exception) -> bytes:
        status, content = told(exc)
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
        response = self._response("failed", self._items("incomplete", self._blocks.blocks))
        return self._written(self._begun()) + failed_response_event(response, code, content, self._num_events)

    def _begun(self) -> list[Event]:
        """Return the events before the first part; none behind it."""
        if self._num_events:
            return []
        begun = {"response": self._response("in_progress", [])}
        return [("response.created", begun), ("response.in_progress", begun)]

    def _ended(self, last: ChoicePart, blocks: Sequence[Block]) -> Json:
        status, usage = _status(last), self._answer.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        receipt: Json = {} if last.receipt is None else {"receipt": last.receipt}
        return self._response(status, self._items(status, blocks)) | {
            **receipt,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }

    def _response(self, status: Status, output: Sequence[Json]) -> Json:
        """Return the response, with the fields of the request told back."""
        asked, sampling = self._request, self._answer.queued.texts[0].request.sampling
        return {
            "id": f"resp_{self._answer.queued.request_id}",
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "model": self._answer.model.name,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": float(sampling.temperature),
            "top_p": 1.0 if sampling.top_p is None else float(sampling.top_p),
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": asked.tool_choice.shown(),
            "tools": [tool.flat() for tool in asked.tools or ()],
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
        }

    def _items(self, status: Status, blocks: Sequence[Block]) -> list[Json]:
        """Return the items of these blocks; only the last one may be cut off."""
        return [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]

    def _item(self, block: Block, status: Status) -> Json:
        shown = {"id": self._item_id(block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        match block.kind:
            case "text":
                return {"type": "message", "role": "assistant", "content": content, **shown}
            case "thought":
                return {"type": "reasoning", "summary": [], "content": content, **shown}
            case "call":
                call = {"call_id": block.call_id, "name": block.name, "arguments": block.content}
                return {"type": "function_call", **call, **shown}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._answer.queued.request_id}_{block.index}"

    def _block_events(self, event: BlockEvent, status: Status) -> list[Event]:
        """Return the events of a change; `status` is that of a block that ends."""
        block, output = event.block, {"output_index": event.block.index}
        item = {**output, "item_id": self._item_id(block)} | ({} if block.kind == "call" else {"content_index": 0})
        name = _EVENTS[block.kind]
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        match event.change:
            case BlockChange.BEGIN:
                added = ("response.output_item.added", {**output, "item": self._item(block, "in_progress")})
                begun = ("response.content_part.added", {**item, "part": _part(block)})
                return [added, begun] if block.kind == "text" else [added]
            case BlockChange.DELTA:
                return [(f"{name}.delta", {**item, "delta": event.delta, **logprobs})]
        text = {"name": block.name, "arguments": block.content} if block.kind == "call" else {"text": block.content}
        done = (f"{name}.done", {**item, **text, **logprobs})
        ended = ("response.content_part.done", {**item, "part": _part(block)})
        last = ("response.output_item.done", {**output, "item": self._item(block, status)})
        return [done, ended, last] if block.kind == "text" else [done, last]

    def _written(self, events: Iterable[Event]) -> bytes:
        numbered = enumerate(events, self._num_events)
        written = [response_event(name, number, content) for number, (name, content) in numbered]
        self._num_events += len(written)
        return b"".join(written)


_PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}
_EVENTS = {
    "text": "response.output_text",
    "thought": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
"""The beginning of names of events, by the kind of their block."""


def _part(block: Block) -> Json:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.content}
    return {"type": "output_text", "text": block.content, "annotations": [], "logprobs": []}


def _status(last: ChoicePart) -> Status:
    return "incomplete" if last.finish_reason == "length" else "completed"


def add_responses(app: FastAPI, respond: Responder) -> None:
    """Add the route to the application."""

    @app.post(RESPONSES_PATH, responses=generation_responses("response.created to response.completed"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer `input` in the shape of OpenAI's Responses; see /v1/chat/completions for what stands behind it."""
        return await respond(request, body.chat_request(), partial(ResponsesWriter, request=body))
