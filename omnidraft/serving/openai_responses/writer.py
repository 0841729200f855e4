"""Writes answers as responses of OpenAI's, whole or as the events of their streams.

A stream is response.created, response.in_progress, for each item output_item.added to output_item.done with what is
between, and response.completed, incomplete or failed. Every event carries its number.
Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic_core import to_json

from omnidraft.serving.answer import Answer
from omnidraft.serving.blocks import Block, BlockBuilder, BlockChange, BlockEvent, blocks_of
from omnidraft.serving.error_handlers import told
from omnidraft.serving.event_stream import RESPONSES_PATH, failed_response_event, response_event
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
        if self._last is not None:
            return []
        begun = {"response": self._response("in_progress", [])}
        return [("response.created", begun), ("response.in_progress", begun)]

    def _ended(self, last: ChoicePart, blocks: Sequence[Block]) -> Json:
        status, usage = _status(last), self._answer.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return self._response(status, self._items(status, blocks)) | {
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
            "text": _text_config(asked),
            "tool_choice": asked.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
        }

    def _items(self, status: Status, blocks: Sequence[Block]) -> list[Json]:
        """Return the items of these blocks; only the last one may be cut off."""
        return [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]

    def _item(self, block: Block, status: Status) -> Json:
        item_id = self._item_id(block)
        if block.is_thought:
            thought = [] if status == "in_progress" else [{"type": "reasoning_text", "text": block.content}]
            return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": thought}
        if block.call_id is None:
            content = [] if status == "in_progress" else [_text(block.content)]
            return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.content}
        return {"id": item_id, "type": "function_call", "status": status, **call}

    def _item_id(self, block: Block) -> str:
        prefix = "rs" if block.is_thought else "msg" if block.call_id is None else "fc"
        return f"{prefix}_{self._answer.queued.request_id}_{block.index}"

    def _block_events(self, event: BlockEvent, status: Status) -> list[Event]:
        """Return the events of a change; `status` is that of a block that ends."""
        block = event.block
        output, item = {"output_index": block.index}, {"item_id": self._item_id(block), "output_index": block.index}
        text = {**item, "content_index": 0}
        if block.is_thought:
            return self._thought_events(event, status)
        match event.change, block.call_id is not None:
            case BlockChange.BEGIN, True:
                return [("response.output_item.added", {**output, "item": self._item(block, "in_progress")})]
            case BlockChange.BEGIN, False:
                added = ("response.output_item.added", {**output, "item": self._item(block, "in_progress")})
                return [added, ("response.content_part.added", {**text, "part": _text("")})]
            case BlockChange.DELTA, True:
                return [("response.function_call_arguments.delta", {**item, "delta": event.delta})]
            case BlockChange.DELTA, False:
                return [("response.output_text.delta", {**text, "delta": event.delta, "logprobs": []})]
            case BlockChange.END, True:
                arguments = {**item, "name": block.name, "arguments": block.content}
                done = ("response.function_call_arguments.done", arguments)
                return [done, ("response.output_item.done", {**output, "item": self._item(block, status)})]
        return [
            ("response.output_text.done", {**text, "text": block.content, "logprobs": []}),
            ("response.content_part.done", {**text, "part": _text(block.content)}),
            ("response.output_item.done", {**output, "item": self._item(block, status)}),
        ]

    def _thought_events(self, event: BlockEvent, status: Status) -> list[Event]:
        """Return the events of a change of a thought."""
        block, output = event.block, {"output_index": event.block.index}
        text = {"item_id": self._item_id(block), **output, "content_index": 0}
        match event.change:
            case BlockChange.BEGIN:
                return [("response.output_item.added", {**output, "item": self._item(block, "in_progress")})]
            case BlockChange.DELTA:
                return [("response.reasoning_text.delta", {**text, "delta": event.delta})]
        done = ("response.reasoning_text.done", {**text, "text": block.content})
        return [done, ("response.output_item.done", {**output, "item": self._item(block, status)})]

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._numbered, events))

    def _numbered(self, made: Event) -> bytes:
        name, content = made
        number, self._num_events = self._num_events, self._num_events + 1
        return response_event(name, number, content)


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(last: ChoicePart) -> Status:
    return "incomplete" if last.finish_reason == "length" else "completed"


def _text_config(request: ResponsesRequest) -> dict[str, Any]:
    """Return `text` as it was asked for; plain text else."""
    form = request.text.format if request.text else None
    return {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)}


def add_responses(app: FastAPI, respond: Responder) -> None:
    """Add the route to the application."""

    @app.post(RESPONSES_PATH, responses=generation_responses("response.created to response.completed"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer `input` in the shape of OpenAI's Responses; see /v1/chat/completions for what stands behind it."""

        def writer_of(answer: Answer) -> ResponsesWriter:
            return ResponsesWriter(answer, body)

        return await respond(request, body.chat_request(), writer_of)
