"""Trace records of an API's responses: their log-probabilities teach as those of a target of one's own do.

An answer that cannot be read as the target's tokens is refused as a whole, and counted by reason.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from omnidraft import assembly, config
from omnidraft.decode.prompting import PromptTokenizer
from omnidraft.decode.recording.record_builder import SEGMENT_TOKENS, RecordContext, TraceRecordBuilder
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.ports import DraftTree, FinishReason, Request, Step, Timings
from omnidraft.serving.request_parts import RequestMessage
from omnidraft.tools.tool_use import tool_use
from omnidraft.traces.record import MAX_TOP_K, TargetLogprobs, TraceRecord
from omnidraft.traces.request_ids import answer_id
from omnidraft.vocab.tokenizer import Vocabulary
from pipelines.lib.api_answers import ApiChoice, ApiExchange, ApiPosition, ApiRequest, ApiToken

FOREIGN = "with tokens that the target's vocabulary does not have"
UNSPELLED = "with tokens whose bytes cannot be told"
NO_LOGPROBS = "without log-probabilities of all tokens"
_ESCAPED = re.compile(r"bytes:((?:[ -~]*\\x[0-9a-f]{2})+[ -~]*)")
"""OpenAI's text of a token that is not UTF-8."""
_NUMBERED = re.compile(r"id:(\d{1,8})")
"""Our own text of a token that spells nothing."""
_REPLACEMENT_CHARACTER = "\ufffd"


class AnswerRefused(OmnidraftError):
    """An answer cannot be learned from; the message says why, in the same words for all answers of that kind."""


@dataclass(frozen=True, slots=True)
class ApiTokenMapper:
    """Maps an API's tokens to a target's ids."""

    vocabulary: Vocabulary
    special_ids: Mapping[str, int]
    """The target's special tokens, which spell nothing, by their text."""

    def emitted_id(self, token: ApiToken) -> int:
        """Return the id of an emitted token. Raises AnswerRefused."""
        found = self._find(token)
        if found is None:
            raise AnswerRefused(UNSPELLED)
        return found

    def logprobs(self, positions: Sequence[ApiPosition], emitted: Sequence[int]) -> TargetLogprobs:
        """Return the log-probabilities at these positions; rows with fewer ids than the longest repeat their first one
        without any probability. Raises AnswerRefused."""
        rows = [self._row(position, token) for position, token in zip(positions, emitted, strict=True)]
        num_columns = min(max(map(len, rows)), MAX_TOP_K)
        ids_EK = np.empty((len(rows), num_columns), np.uint32)
        log_p_EK = np.full((len(rows), num_columns), -np.inf)
        for index, row in enumerate(rows):
            likeliest = sorted(row.items(), key=lambda item: -item[1])[:num_columns]
            ids_EK[index] = likeliest[0][0]
            ids_EK[index, : len(likeliest)] = [token for token, _ in likeliest]
            log_p_EK[index, : len(likeliest)] = [log_p for _, log_p in likeliest]
        with np.errstate(divide="ignore"):
            tail_E = np.log((1 - np.exp(log_p_EK).sum(axis=1)).clip(min=0.0))
        emitted_E = [row[token] for row, token in zip(rows, emitted, strict=True)]
        return TargetLogprobs(
            top_ids_EK=ids_EK,
            top_log_p_EK=log_p_EK.astype(np.float16),
            emitted_log_p_E=np.array(emitted_E, np.float16),
            tail_log_p_E=tail_E.astype(np.float16),
        )

    def _row(self, position: ApiPosition, emitted: int) -> dict[int, float]:
        """Return the log-probabilities of one position by id, the emitted one's among them."""
        if (own := _log_p(position)) is None:
            raise AnswerRefused(NO_LOGPROBS)
        row: dict[int, float] = {}
        for each in position.top_logprobs or ():
            token, log_p = self._find(each), _log_p(each)
            if token is not None and log_p is not None:  # else it is a part of the rest
                row[token] = float(np.logaddexp(row[token], log_p)) if token in row else log_p
        row[emitted] = max(row.get(emitted, own), own)
        return row

    def _find(self, token: ApiToken) -> int | None:
        """Return the id of a token, None where nothing tells which one it is.

        Raises:
            AnswerRefused: it spells what no token of the vocabulary does.
        """
        data = token_bytes(token)
        if data is None:
            return None
        found = self.vocabulary.byte_table.get(data) if data else self._numbered(token.token)
        if found is None:
            found = self.special_ids.get(token.token)
        if found is None and data:
            raise AnswerRefused(FOREIGN)
        return found

    def _numbered(self, text: str) -> int | None:
        matched = _NUMBERED.fullmatch(text)
        if matched is None or (found := int(matched[1])) >= len(self.vocabulary):
            return None
        return None if self.vocabulary.token_bytes[found] else found


def token_bytes(token: ApiToken) -> bytes | None:
    """Return the bytes that a token spells, from its text where the server tells no bytes; None: they are lost."""
    if token.bytes is not None:
        return bytes(token.bytes)
    if escaped := _ESCAPED.fullmatch(token.token):
        return escaped[1].encode("ascii").decode("unicode_escape").encode("latin-1")
    if _REPLACEMENT_CHARACTER in token.token:
        return None
    return token.token.encode("utf-8", "surrogatepass")


def _log_p(token: ApiToken) -> float | None:
    """Return a log-probability, never above 0; None for none."""
    return None if token.logprob is None or math.isnan(token.logprob) else min(token.logprob, 0.0)


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
        self._tokenizers = assembly.vocabularies(settings)
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
