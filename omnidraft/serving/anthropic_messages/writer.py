"""Writes answers as messages of Anthropic's, whole or as the events of their streams.

A stream is message_start, then content_block_start, content_block_delta ... and content_block_stop for each block, then
message_delta and message_stop. Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

import json
from collections.abc import Iterable, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json

from omnidraft.serving.answer import Answer
from omnidraft.serving.anthropic_messages.request_schemas import CountTokensRequest, MessagesRequest
from omnidraft.serving.blocks import Block, BlockBuilder, BlockChange, BlockEvent, blocks_of
from omnidraft.serving.error_handlers import (
    MESSAGES_PATH,
    THREAD_REFUSED,
    AnthropicError,
    FieldRefused,
    anthropic_error,
    told,
)
from omnidraft.serving.event_stream import ANTHROPIC_PING, event
from omnidraft.serving.response_formats import ChoicePart
from omnidraft.serving.response_schemas import Json, error_responses, generation_responses
from omnidraft.serving.responses import Responder
from omnidraft.serving.tokenization import Tokenization

Event = tuple[str, Json]


class MessageWriter:
    """Writes one answer; see responses.ResponseWriter."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = BlockBuilder()
        self._last: ChoicePart | None = None

    def whole(self, parts: Sequence[ChoicePart]) -> bytes:
        content = [_content(block) for block in blocks_of(parts)]
        return to_json(self._message(content, _stop_reason(parts[-1]), parts[-1].stop_string))

    def events(self, part: ChoicePart) -> bytes:
        events: list[Event] = []
        if self._last is None:
            events.append(("message_start", {"message": self._message([], None, None)}))
        self._last = part
        return _written([*events, *map(_block_event, self._blocks.take(part))])

    def ping(self) -> bytes:
        return ANTHROPIC_PING

    def last_events(self) -> bytes:
        assert self._last is not None  # every answer has a part, at least its end
        stop = {"stop_reason": _stop_reason(self._last), "stop_sequence": self._last.stop_string}
        ended = map(_block_event, self._blocks.finish())
        return _written([*ended, ("message_delta", {"delta": stop, "usage": self._usage()}), ("message_stop", {})])

    def error_events(self, exc: Exception) -> bytes:
        return event("error", anthropic_error(*told(exc, MESSAGES_PATH)))

    def _message(self, content: list[Json], stop_reason: str | None, stop_sequence: str | None) -> Json:
        """Return the message; only the first event of a stream has no reason for which it stopped."""
        return {
            "id": f"msg_{self._answer.queued.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.model.name,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """Return the usage; prompt tokens that an earlier request began with are not among `input_tokens`."""
        usage = self._answer.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage.completion_tokens,
        }


def _stop_reason(part: ChoicePart) -> str:
    if part.stop_string is not None:
        return "stop_sequence"
    assert part.finish_reason is not None
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(part.finish_reason, "end_turn")


def _content(block: Block) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.content}
        case "thought":
            return {"type": "thinking", "thinking": block.content, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.content)}


def _arguments(text: str) -> Json:
    """Return the arguments of a call; none where the answer was cut off in them, or where they cannot be sent."""
    try:
        parsed = json.loads(text)
        to_json([[[parsed]]])  # at least as deep as in a message; it refuses halves of surrogate pairs too
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


_DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The types of deltas and their field, by the kind of their block."""


def _block_event(event: BlockEvent) -> Event:
    place = {"index": event.block.index}
    match event.change:
        case BlockChange.BEGIN:
            return "content_block_start", {**place, "content_block": _content(event.block)}
        case BlockChange.DELTA:
            kind, field = _DELTAS[event.block.kind]
            return "content_block_delta", {**place, "delta": {"type": kind, field: event.delta}}
        case BlockChange.END:
            return "content_block_stop", place


class TokenCount(BaseModel):
    input_tokens: int


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(event(name, {"type": name, **content}) for name, content in events)


def add_messages(app: FastAPI, respond: Responder, tokenization: Tokenization) -> None:
    """Add the routes to the application."""

    @app.post(MESSAGES_PATH, responses=generation_responses("message_start to message_stop", error=AnthropicError))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer messages in Anthropic's shape; see /v1/chat/completions for what stands behind it."""
        if body.thread is not None:
            message = "thread: conversations are not kept here; send the whole of it"
            raise FieldRefused(message, status=400, field="thread", code=THREAD_REFUSED)
        return await respond(request, body.chat_request(), MessageWriter)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses=error_responses(400, 404, 413, 500, error=AnthropicError))
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Count the tokens of the prompt that these messages make."""
        ids = await tokenization.prompt_ids(request, body.chat_request())
        return TokenCount(input_tokens=len(ids))
