"""Writes answers as OpenAI's completions and chat completions, whole or as server-sent events."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from pydantic_core import to_json

from omnidraft.decode.teacher_forcing import PromptToken
from omnidraft.serving.answer import Answer
from omnidraft.serving.error_handlers import told
from omnidraft.serving.event_stream import DONE, PING, last_error_events, unnamed_event
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_formats import (
    ChoicePart,
    NamedCall,
    echoed,
    for_chat,
    for_completion,
    for_prompt,
    token_text,
)
from omnidraft.serving.response_schemas import Json


class CompletionWriter:
    """Writes one answer; see responses.ResponseWriter."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._body, self._texts = answer, answer.body, answer.queued.texts
        self._vocabulary = answer.model.vocabulary
        self._has_begun = False

    def whole(self, parts: Sequence[ChoicePart]) -> bytes:
        choices = [ChoicePart(index, True) for index in range(len(self._texts))]
        for part in parts:
            choices[part.index].add(part)
        return to_json(self._with_choices(*choices) | self._usage() | self._answer.figures())

    def events(self, part: ChoicePart) -> bytes:
        return b"".join(self._event(self._with_choices(each) | self._usage_so_far()) for each in self._opened(part))

    def _opened(self, part: ChoicePart) -> Sequence[ChoicePart]:
        """Return the part, the first one of several chats behind an empty part of each: OpenAI's client fails where a
        choice begins before the one of the index before it."""
        had_begun, self._has_begun = self._has_begun, True
        if isinstance(self._body, CompletionRequest) or len(self._texts) == 1:
            return [part]
        part.is_first = False
        return [part] if had_begun else [*(ChoicePart(index, True) for index in range(len(self._texts))), part]

    def ping(self) -> bytes:
        return PING

    def last_events(self) -> bytes:
        if not (self._body.wants_usage or self._body.figures):
            return DONE
        usage = self._usage() if self._body.wants_usage else {}
        return self._event(self._with_choices() | usage | self._answer.figures()) + DONE

    def error_events(self, exc: Exception) -> bytes:
        return last_error_events(told(exc)[1])

    def _event(self, chunk: Json) -> bytes:
        return unnamed_event(to_json(chunk).decode())

    @cached_property
    def _frame(self) -> Json:
        """What stands before the choices, the same in every chunk."""
        is_chat, request_id = isinstance(self._body, ChatRequest), self._answer.queued.request_id
        kind = "chat.completion.chunk" if self._body.stream else "chat.completion"
        return {
            "id": f"chatcmpl-{request_id}" if is_chat else f"cmpl-{request_id}",
            "object": kind if is_chat else "text_completion",
            "created": self._answer.created,
            "model": self._answer.model.name,
            "system_fingerprint": self._answer.system_fingerprint,
        }

    def _name_of(self, token: int) -> str:
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else token_text(token, self._vocabulary)

    def _with_choices(self, *parts: ChoicePart) -> Json:
        """Return a response; a chat has beside its choices what a completion has of the prompt in each, as in vLLM."""
        choices = [self._choice(part) for part in parts]
        has_prompt = isinstance(self._body, ChatRequest) and parts and parts[0].index == 0
        beside = self._of_prompt(parts[0]) if has_prompt else {}
        return {**self._frame, "choices": choices, **beside}

    def _choice(self, part: ChoicePart) -> Json:
        if isinstance(self._body, CompletionRequest):
            shown = self._completion(part, self._body) | self._of_prompt(part)
        else:
            logprobs = None if part.entries is None else for_chat(part.entries, self._name_of, self._vocabulary)
            shown = {"delta" if self._body.stream else "message": self._message(part), "logprobs": logprobs}
        if part.spans:
            shown["drafted_by"] = [(span.text, span.source) for span in part.spans]
        if self._body.return_token_ids:
            shown["token_ids"] = part.token_ids
        if part.receipt is not None:
            shown["receipt"] = part.receipt
        return {"index": part.index, **shown, "finish_reason": part.finish_reason}

    def _completion(self, part: ChoicePart, body: CompletionRequest) -> Json:
        """Return the text, behind the prompt where that is echoed."""
        text, entries = part.text, part.entries
        if body.max_tokens == 0:
            text, entries, part.token_ids = "", entries and [], []
        if body.echo:
            prompt = self._prompt_texts[part.index]
            entries = entries and [replace(each, offset=each.offset + len(prompt)) for each in entries]
            if part.is_first:
                text = prompt + text
                scored = echoed(self._prompt_ids(part), self._scored_prompt(part), self._vocabulary)
                entries = None if entries is None else [*scored, *entries]
        return {"text": text, "logprobs": None if entries is None else for_completion(entries, self._name_of)}

    def _message(self, part: ChoicePart) -> Json:
        """Return a message, or what a chunk adds to it: thoughts under both names that clients read, DeepSeek's and
        vLLM's, and no field of calls where there are none, as at OpenAI."""
        message: Json = {"role": "assistant"} if part.is_first else {}
        thoughts, calls = part.thoughts, part.calls
        message["content"] = part.text if part.text or not (calls or thoughts) else None
        if thoughts:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if calls:
            message["tool_calls"] = [_call(each, is_chunk=bool(self._body.stream)) for each in calls]
        return message

    def _of_prompt(self, part: ChoicePart) -> Json:
        """Return what the request asks to know of the prompt; once in a stream."""
        told: Json = {}
        if self._body.return_token_ids and part.is_first:
            told["prompt_token_ids"] = self._prompt_ids(part)
        if self._body.prompt_logprobs is not None and part.is_first:
            told["prompt_logprobs"] = for_prompt(self._scored_prompt(part), self._vocabulary)
        return told

    def _prompt_ids(self, part: ChoicePart) -> Sequence[int]:
        decoded = self._texts[part.index].decoded
        assert decoded is not None
        return decoded.prompt_ids

    @cached_property
    def _prompt_texts(self) -> Sequence[str]:
        """The text of each choice's prompt."""
        ids = (text.decoded.prompt_ids for text in self._texts if text.decoded is not None)
        return [self._vocabulary.spell(each).decode("utf-8", "replace") for each in ids]

    def _scored_prompt(self, part: ChoicePart) -> Sequence[PromptToken]:
        """Return the prompt's tokens with their log-probabilities, which the first choice of the prompt has."""
        return self._texts[part.index - part.index % (self._body.n or 1)].prompt_tokens

    def _usage_so_far(self) -> Json:
        if self._body.wants_continuous_usage:
            return {"usage": self._answer.usage()}
        return {"usage": None} if self._body.wants_usage else {}

    def _usage(self) -> Json:
        metrics = self._answer.metrics()
        return {"usage": self._answer.usage()} | ({} if metrics is None else {"metrics": metrics})


def _call(call: NamedCall, *, is_chunk: bool) -> Json:
    """Return a call, or what a chunk adds to it."""
    shown: Json = {"index": call.index} if is_chunk else {}
    if call.id is None:
        return shown | {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return shown | {"id": call.id, "type": "function", "function": function}
