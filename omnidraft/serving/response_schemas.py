"""What clients get, in OpenAI's words: the OpenAPI document shows these models, and responses are made of them."""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    """The token that ended a text included."""
    total_tokens: int


class CompletionLogProbs(BaseModel):
    """One entry a token that put something into the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where each token begins in this choice's text, in characters."""


class TokenLogProb(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenLogProb):
    top_logprobs: list[TokenLogProb]


class ChatLogProbs(BaseModel):
    """One entry a token that put something into the text."""

    content: list[ChatToken]
    refusal: None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: FinishReason | None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None
    finish_reason: FinishReason | None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    """In a choice's first chunk."""
    content: str


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogProbs | None
    finish_reason: FinishReason | None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    """The snapshot that drafted, and the target's fingerprint: all that a text depends on besides the request."""
    usage: Usage | None = None
    """Of a stream: in its last chunk, if `stream_options.include_usage` asks for it."""
    omnidraft: dict[str, Any] | None = Field(None)
    """What speculation did, the snapshot's version and the seed of each choice; when `figures` asks for it."""


class Completion(_Answer):
    """A chunk of a stream looks the same."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "omnidraft"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Of every 4xx and 5xx."""

    error: ErrorDetail


class Health(BaseModel):
    status: str
