"""Formats of the choices in each kind of response: whole completions and chats, and the chunks of both."""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from omnidraft.serving import response_schemas
from omnidraft.serving.logprob_format import LogprobEntry, for_chat, for_completion
from omnidraft.vocab.tokenizer import Vocabulary


@dataclass(slots=True)
class ChoicePart:
    """A part of one choice, or all of it."""

    index: int
    is_first: bool
    text: str = ""
    finish_reason: response_schemas.FinishReason | None = None
    entries: list[LogprobEntry] | None = None
    """Log-probabilities of its tokens; None unless the request asks for them."""


@dataclass(frozen=True, slots=True)
class ResponseKind:
    """The format of one endpoint's responses, whole or as chunks."""

    prefix: str
    name: str
    choice: Callable[[ChoicePart, Vocabulary], BaseModel]


def _completion(part: ChoicePart, vocabulary: Vocabulary) -> BaseModel:
    return response_schemas.CompletionChoice.model_construct(
        index=part.index,
        text=part.text,
        logprobs=None if part.entries is None else for_completion(part.entries, vocabulary),
        finish_reason=part.finish_reason,
    )


def _message(part: ChoicePart, vocabulary: Vocabulary) -> BaseModel:
    return response_schemas.ChatChoice.model_construct(
        index=part.index,
        message=response_schemas.ChatMessage.model_construct(role="assistant", content=part.text),
        logprobs=_chat_log_probs(part, vocabulary),
        finish_reason=part.finish_reason,
    )


def _delta(part: ChoicePart, vocabulary: Vocabulary) -> BaseModel:
    delta = response_schemas.ChatDelta.model_construct(content=part.text)
    if part.is_first:
        delta = response_schemas.ChatDelta.model_construct(role="assistant", content=part.text)
    return response_schemas.ChatChunkChoice.model_construct(
        index=part.index,
        delta=delta,
        logprobs=_chat_log_probs(part, vocabulary),
        finish_reason=part.finish_reason,
    )


def _chat_log_probs(part: ChoicePart, vocabulary: Vocabulary) -> response_schemas.ChatLogProbs | None:
    return None if part.entries is None else for_chat(part.entries, vocabulary)


COMPLETION = ResponseKind("cmpl-", "text_completion", _completion)
CHAT = ResponseKind("chatcmpl-", "chat.completion", _message)
CHAT_CHUNK = ResponseKind("chatcmpl-", "chat.completion.chunk", _delta)
