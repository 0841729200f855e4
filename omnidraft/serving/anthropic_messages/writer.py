"""Writes answers as messages of Anthropic's, whole or as the events of their streams.

A stream is message_start, then content_block_start, content_block_delta ... and content_block_stop for each block, then
message_delta and message_stop. Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic_core import to_json

from omnidraft.errors import RequestError
from omnidraft.serving.answer import Answer, Block, BlockBuilder, BlockChange, BlockEvent, blocks_of
from omnidraft.serving.anthropic_messages.request_schemas import CountTokensRequest, MessagesRequest
from omnidraft.serving.anthropic_messages.response_schemas import (
    PATH,
    THREAD_REFUSED,
    AnthropicError,
    Message,
    MessageUsage,
    StopReason,
    TextContent,
    TokenCount,
    ToolUseContent,
    anthropic_error_event,
)
from omnidraft.serving.error_handlers import FieldRefused, stream_error
from omnidraft.serving.event_stream import event
from omnidraft.serving.response_formats import ChoicePart
from omnidraft.serving.response_schemas import error_responses, generation_responses
from omnidraft.serving.responses import Responder
from omnidraft.serving.tokenization import Tokenization

Event = tuple[str, Mapping[str, Any]]


class MessageWriter:
    """Writes one answer; see responses.ResponseWriter."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = BlockBuilder()
        self._last: ChoicePart | None = None

    def whole(self, parts: Sequence[ChoicePart]) -> bytes:
        content = [_content(block) for block in blocks_of(parts)]
        message = self._message(content, _stop_reason(parts[-1]), parts[-1].stop_string)
        return message.model_dump_json().encode()

    def events(self, part: ChoicePart) -> bytes:
        events: list[Event] = []
        if self._last is None:
            events.append(("message_start", {"message": self._message([], None, None).model_dump()}))
        self._last = part
        return _written([*events, *map(_block_event, self._blocks.take(part))])

    def last_events(self) -> bytes:
        assert self._last is not None  # every answer has a part, at least its end
        stop = {"stop_reason": _stop_reason(self._last), "stop_sequence": self._last.stop_string}
        ended = map(_block_event, self._blocks.finish())
        return _written([*ended, ("message_delta", {"delta": stop, "usage": self._usage()}), ("message_stop", {})])

    def error_events(self, exc: Exception) -> bytes:
        status = 400 if isinstance(exc, RequestError) else 500
        return anthropic_error_event(status, stream_error(exc))

    def _message(
        self, content: list[TextContent | ToolUseContent], stop_reason: StopReason | None, stop_sequence: str | None
    ) -> Message:
        return Message(
            id=f"msg_{self._answer.queued.request_id}",
            model=self._answer.model.name,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=MessageUsage(**self._usage()),
        )

    def _usage(self) -> dict[str, int]:
        usage = self._answer.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage.completion_tokens,
        }


def _stop_reason(part: ChoicePart) -> StopReason:
    if part.stop_string is not None:
        return "stop_sequence"
    assert part.finish_reason is not None
    reasons: Mapping[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
    return reasons.get(part.finish_reason, "end_turn")


def _content(block: Block) -> TextContent | ToolUseContent:
    if block.call_id is None:
        return TextContent(text=block.content)
    return ToolUseContent(id=block.call_id, name=block.name, input=_arguments(block.content))


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where the answer was cut off in them, or where they cannot be sent."""
    try:
        parsed = json.loads(text)
        to_json([[parsed]])  # at least as deep as in a message; it refuses halves of surrogate pairs too
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _block_event(event: BlockEvent) -> Event:
    place, is_call = {"index": event.block.index}, event.block.call_id is not None
    match event.change:
        case BlockChange.BEGIN:
            begun: dict[str, Any] = {"type": "text", "text": ""}
            if is_call:
                begun = {"type": "tool_use", "id": event.block.call_id, "name": event.block.name, "input": {}}
            return "content_block_start", {**place, "content_block": begun}
        case BlockChange.DELTA:
            kind, field = ("input_json_delta", "partial_json") if is_call else ("text_delta", "text")
            return "content_block_delta", {**place, "delta": {"type": kind, field: event.delta}}
        case BlockChange.END:
            return "content_block_stop", place


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(event(name, {"type": name, **content}) for name, content in events)


def add_messages(app: FastAPI, respond: Responder, tokenization: Tokenization) -> None:
    """Add the routes to the application."""

    @app.post(PATH, responses=generation_responses(Message, "message_start to message_stop", AnthropicError))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer messages in Anthropic's shape; see /v1/chat/completions for what stands behind it."""
        if body.thread is not None:
            message = "thread: conversations are not kept here; send the whole of it"
            raise FieldRefused(message, status=400, field="thread", code=THREAD_REFUSED)
        return await respond(request, body.chat_request(), MessageWriter)

    @app.post(f"{PATH}/count_tokens", responses=error_responses(400, 404, 413, 500, error=AnthropicError))
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Count the tokens of the prompt that these messages make."""
        ids = await tokenization.prompt_ids(request, body.chat_request())
        return TokenCount(input_tokens=len(ids))
