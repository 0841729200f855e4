"""Trace records of an API's responses: their log-probabilities teach as those of a target of one's own do.

An answer that cannot be read as the target's tokens is refused as a whole, and counted by reason.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from omnidraft import config, wiring
from omnidraft.decode.prompting import PromptTokenizer
from omnidraft.decode.recording.record_builder import SEGMENT_TOKENS, RecordContext, TraceRecordBuilder
from omnidraft.errors import RequestError
from omnidraft.ports import DraftTree, FinishReason, Request, Step, Timings
from omnidraft.serving.request_parts import RequestMessage
from omnidraft.tools.tool_use import tool_use
from omnidraft.traces.record import TraceRecord
from omnidraft.traces.request_ids import answer_id
from pipelines.lib.api_answers import ApiChoice, ApiExchange, ApiRequest
from pipelines.lib.api_tokens import NO_LOGPROBS, AnswerRefused, ApiTokenMapper

WORKER = "pipelines.record --from-api"
NO_ANSWER = "without an answer"
MODEL_REFUSED = "in which the model refused"
CALLS = "that call tools"
NOT_SPELLED = "whose tokens do not spell their text"
PROMPT = "to messages that the chat templates do not take"
_REASONS: Mapping[str | None, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class ApiRecording:
    """Turns exchanges with an API into trace records of one pair."""

    def __init__(self, settings: config.Settings, tenant: str) -> None:
        self._settings, self._tenant = settings, tenant
        self._tokenizers = wiring.vocabularies(settings)
        target = self._tokenizers.target
        self._mapper = ApiTokenMapper(target.vocabulary, target.special_ids)
        self.refused: Counter[str] = Counter()
        """Answers that are in no record, by reason."""

    def records_of(self, exchange: ApiExchange) -> list[TraceRecord]:
        """Return the records of all choices of a response."""
        records: list[TraceRecord] = []
        if not exchange.response.choices:
            self.refused[NO_ANSWER] += 1
        for index, choice in enumerate(exchange.response.choices):
            try:
                records += self._record(exchange.request, choice, index)
            except AnswerRefused as exc:
                self.refused[str(exc)] += 1
        return records

    def _record(self, asked: ApiRequest, choice: ApiChoice, index: int) -> list[TraceRecord]:
        _require_text(choice)
        prompts = [self._prompt_ids(asked, each) for each in (self._tokenizers.target, self._tokenizers.drafter)]
        steps = list(self._steps(choice, prompts[0][-1]))
        request = Request(
            prompt_ids=tuple(prompts[0]),
            drafter_prompt_ids=tuple(prompts[1]),
            max_new_tokens=sum(len(step.emitted) for step in steps),
            stop_ids=self._tokenizers.target.stop_ids,
            mode="fast",
            num_draft_tokens=0,
        )
        records: list[TraceRecord] = []
        builder = TraceRecordBuilder(request, self._context(asked, choice, index), records.append)
        for step in steps:
            builder.take(step)
        builder.flush(None)
        return records

    def _context(self, asked: ApiRequest, choice: ApiChoice, index: int) -> RecordContext:
        request, answer = asked.model_dump_json(), f"{index}\n{choice.model_dump_json()}"
        return RecordContext(
            request_id=answer_id(f"api-{_digest(request)}", _digest(answer)),
            tenant=self._tenant,
            worker=WORKER,
            target=self._settings.models.target,
            drafter=self._settings.models.drafter,
            snapshot_version=None,
            alignment=self._tokenizers.alignment.fingerprint,
            has_settings=False,  # how the API drew is its own affair
        )

    def _prompt_ids(self, asked: ApiRequest, tokenizer: PromptTokenizer) -> Sequence[int]:
        if not asked.messages:
            raise AnswerRefused(PROMPT)
        try:
            messages = [RequestMessage.model_validate(each).plain() for each in asked.messages]
            tools: Sequence[Mapping[str, Any]] = tool_use(asked.tools).definitions() if asked.tools else ()
            return tokenizer.chat_prompt_ids(messages, tools)
        except (ValidationError, RequestError) as exc:  # images, for example
            raise AnswerRefused(PROMPT) from exc

    def _steps(self, choice: ApiChoice, root: int) -> Iterator[Step]:
        """Yield the answer in steps of a record's length, with nothing drafted. Raises AnswerRefused."""
        positions = (choice.logprobs and choice.logprobs.content) or []
        emitted = [self._mapper.emitted_id(position) for position in positions]
        text = self._tokenizers.target.vocabulary.spell(emitted).decode("utf-8", "replace")
        if not _is_spelled(choice.message.content or "", text):
            raise AnswerRefused(NOT_SPELLED)
        for start in range(0, len(emitted), SEGMENT_TOKENS):
            chosen = slice(start, start + SEGMENT_TOKENS)
            yield Step(
                tree=DraftTree.empty(root),
                emitted=tuple(emitted[chosen]),
                path=(),
                text="",
                finish_reason=_REASONS.get(choice.finish_reason) if start + SEGMENT_TOKENS >= len(emitted) else None,
                timings=Timings(),
                target_logprobs=self._mapper.logprobs(positions[chosen], emitted[chosen]),
            )
            root = emitted[chosen][-1]


def _require_text(choice: ApiChoice) -> None:
    """Raise AnswerRefused unless the choice is a text with log-probabilities."""
    if choice.message.refusal:
        raise AnswerRefused(MODEL_REFUSED)
    if choice.message.tool_calls:
        raise AnswerRefused(CALLS)
    if not choice.message.content:
        raise AnswerRefused(NO_ANSWER)
    if choice.logprobs is None or not choice.logprobs.content:
        raise AnswerRefused(NO_LOGPROBS)


def _is_spelled(content: str, text: str) -> bool:
    """Return whether the tokens spell this text; the last ones may go on, behind the beginning of a stop string, and a
    character that is cut off at the end may be missing on either side."""
    return text.startswith(content.rstrip("\ufffd"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
