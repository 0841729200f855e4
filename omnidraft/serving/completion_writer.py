"""Writes answers as OpenAI's completions and chat completions, whole or as server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import replace

from pydantic_core import to_json

from omnidraft.serving.answer import Answer
from omnidraft.serving.error_handlers import told
from omnidraft.serving.event_stream import DONE, last_error_events, unnamed_event
from omnidraft.serving.request_schemas import CompletionRequest
from omnidraft.serving.response_formats import (
    CHAT,
    CHAT_CHUNK,
    COMPLETION,
    ChoicePart,
    ResponseKind,
    echoed,
    for_prompt,
)


class CompletionWriter:
    """Writes one answer; see responses.ResponseWriter."""

    def __init__(self, answer: Answer, whole: ResponseKind, chunk: ResponseKind) -> None:
        self._answer, self._body = answer, answer.body
        self._kind = chunk if answer.body.stream else whole
        self._head: str | None = None

    @staticmethod
    def of_completion(answer: Answer) -> "CompletionWriter":
        """Return the writer of an answer to a completion request."""
        return CompletionWriter(answer, COMPLETION, COMPLETION)

    @staticmethod
    def of_chat(answer: Answer) -> "CompletionWriter":
        """Return the writer of an answer to a chat request."""
        return CompletionWriter(answer, CHAT, CHAT_CHUNK)

    def whole(self, parts: Sequence[ChoicePart]) -> bytes:
        choices = [ChoicePart(index, True) for index in range(len(self._answer.queued.texts))]
        for part in parts:
            choices[part.index].add(part)
        if self._body.prompt_logprobs is not None:
            self._add_prompts(choices)
        dumped = ",".join(self._choice(choice) for choice in choices)
        tail = self._usage() | self._answer.figures() | self._chat_prompt(choices[0])
        return f"{self._frame()}[{dumped}],{json.dumps(tail)[1:]}".encode()

    def events(self, part: ChoicePart) -> bytes:
        return b"".join(self._event(each) for each in self._opened(part))

    def _opened(self, part: ChoicePart) -> Sequence[ChoicePart]:
        """Return the part, the first one of several chats behind an empty part of each: OpenAI's client fails where a
        choice begins before the one of the index before it."""
        num_choices = len(self._answer.queued.texts)
        if self._kind is not CHAT_CHUNK or num_choices == 1:
            return [part]
        part.is_first = False
        openings = [ChoicePart(index, True) for index in range(num_choices)] if self._head is None else []
        return [*openings, part]

    def _event(self, part: ChoicePart) -> bytes:
        usage = ',"usage":null' if self._body.wants_usage else ""
        if self._body.wants_continuous_usage:
            usage = f',"usage":{self._answer.usage().model_dump_json()}'
        return unnamed_event(f"{self._frame()}[{self._choice(part)}]{usage}}}")

    def last_events(self) -> bytes:
        if not (self._body.wants_usage or self._body.figures):
            return DONE
        tail = (self._usage() if self._body.wants_usage else {}) | self._answer.figures()
        return unnamed_event(f"{self._frame()}[],{json.dumps(tail)[1:]}") + DONE

    def error_events(self, exc: Exception) -> bytes:
        return last_error_events(told(exc)[1])

    def _add_prompts(self, choices: Sequence[ChoicePart]) -> None:
        """Give each choice the scores of its prompt, which the first choice of the prompt has."""
        num_per_prompt, texts = self._body.n or 1, self._answer.queued.texts
        for index, choice in enumerate(choices):
            choice.prompt = texts[index - index % num_per_prompt].prompt_tokens

    def _chat_prompt(self, choice: ChoicePart) -> dict[str, object]:
        """Return the scores of a chat's prompt, which stand beside the choices, as in vLLM."""
        if self._kind is not CHAT or choice.prompt is None:
            return {}
        return {"prompt_logprobs": for_prompt(choice.prompt, self._answer.model.vocabulary)}

    def _choice(self, part: ChoicePart) -> str:
        if isinstance(self._body, CompletionRequest):
            if self._body.max_tokens == 0:
                part.pieces, part.entries = [], part.entries and []
            if self._body.echo and part.is_first:
                self._echo(part)
        shown = self._kind.choice(part, self._answer.model.vocabulary)
        if self._body.return_token_ids:
            shown["token_ids"] = part.token_ids
            if part.is_first:
                shown["prompt_token_ids"] = self._prompt_ids(part)
        return to_json(shown).decode()

    def _prompt_ids(self, part: ChoicePart) -> Sequence[int]:
        decoded = self._answer.queued.texts[part.index].decoded
        assert decoded is not None
        return decoded.prompt_ids

    def _echo(self, part: ChoicePart) -> None:
        """Put the prompt before the first part of a choice, and its log-probabilities before those of the answer."""
        vocabulary, ids = self._answer.model.vocabulary, self._prompt_ids(part)
        text = vocabulary.spell(ids).decode("utf-8", "replace")
        part.pieces.insert(0, text)
        if part.entries is not None:
            texts, num_per_prompt = self._answer.queued.texts, self._body.n or 1
            scored = texts[part.index - part.index % num_per_prompt].prompt_tokens
            behind = [replace(each, offset=each.offset + len(text)) for each in part.entries]
            part.entries = [*echoed(ids, scored, vocabulary), *behind]

    def _frame(self) -> str:
        """Return the JSON before the choices, which is the same in every chunk."""
        if self._head is None:
            frame = {
                "id": self._kind.prefix + self._answer.queued.request_id,
                "object": self._kind.name,
                "created": self._answer.created,
                "model": self._answer.model.name,
                "system_fingerprint": self._answer.system_fingerprint,
            }
            self._head = json.dumps(frame)[:-1] + ',"choices":'
        return self._head

    def _usage(self) -> dict[str, object]:
        metrics = self._answer.metrics()
        shown: dict[str, object] = {} if metrics is None else {"metrics": metrics.model_dump()}
        return {"usage": self._answer.usage().model_dump(), **shown}
