"""How the choices of each kind of response look: whole completions and chats, and the chunks of both."""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from omnidraft.serving import response_schemas
from omnidraft.serving.logprob_format import LogprobEntry, for_chat, for_completion
from omnidraft.vocab.tokenizer import Vocabulary


@dataclass(slots=True)
class Piece:
    """A part of one choice, or all of it."""

    index: int
    is_first: bool
    text: str = ""
    finish_reason: response_schemas.FinishReason | None = None
    entries: list[LogprobEntry] | None = None
    """Its tokens' log-probabilities; None when nobody asked for them."""


@dataclass(frozen=True, slots=True)
class ResponseKind:
    """How one endpoint's responses look."""

    prefix: str
    name: str
    choice: Callable[[Piece, Vocabulary], BaseModel]


def _completion(piece: Piece, vocabulary: Vocabulary) -> BaseModel:
    return response_schemas.CompletionChoice.model_construct(
        index=piece.index,
        text=piece.text,
        logprobs=None if piece.entries is None else for_completion(piece.entries, vocabulary),
        finish_reason=piece.finish_reason,
    )


def _message(piece: Piece, vocabulary: Vocabulary) -> BaseModel:
    return response_schemas.ChatChoice.model_construct(
        index=piece.index,
        message=response_schemas.ChatMessage.model_construct(role="assistant", content=piece.text),
        logprobs=_chat_log_probs(piece, vocabulary),
        finish_reason=piece.finish_reason,
    )


def _delta(piece: Piece, vocabulary: Vocabulary) -> BaseModel:
    delta = response_schemas.ChatDelta.model_construct(content=piece.text)
    if piece.is_first:
        delta = response_schemas.ChatDelta.model_construct(role="assistant", content=piece.text)
    return response_schemas.ChatChunkChoice.model_construct(
        index=piece.index,
        delta=delta,
        logprobs=_chat_log_probs(piece, vocabulary),
        finish_reason=piece.finish_reason,
    )


def _chat_log_probs(piece: Piece, vocabulary: Vocabulary) -> response_schemas.ChatLogProbs | None:
    return None if piece.entries is None else for_chat(piece.entries, vocabulary)


COMPLETION = ResponseKind("cmpl-", "text_completion", _completion)
CHAT = ResponseKind("chatcmpl-", "chat.completion", _message)
CHAT_CHUNK = ResponseKind("chatcmpl-", "chat.completion.chunk", _delta)
