"""Response bodies of OpenAI's API; the OpenAPI document shows these models, and responses are made of them.

The module imports no model code, so that Ray Serve's ingress, which has no models, can use it.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from omnidraft.serving.request_parts import ToolCall

Json = dict[str, Any]
"""An object of a response."""
FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    """Tokens that were not read again, since an earlier request began with them."""


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0
    """Tokens of thoughts, and of what closed them."""
    accepted_prediction_tokens: int = 0
    """Tokens of the client's prediction that the answer took over."""
    rejected_prediction_tokens: int = 0
    """The others of it."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    """This includes the token that ended a text."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class CompletionLogProbs(BaseModel):
    """One entry a token that put something into the text; of an echoed prompt's first token they are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Offset of each token in the text of this choice, in characters."""


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


class PromptLogProb(BaseModel):
    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str


class PromptTokens(BaseModel):
    """What is told of a prompt, with `return_token_ids` and with `prompt_logprobs`."""

    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogProb] | None] | None = None
    """One entry a token, by ids; none for the first, which nothing stands before."""


class _Choice(BaseModel):
    index: int
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    """All that were drawn, if `return_token_ids` is set."""
    receipt: dict[str, Any] | None = None
    """A DSSE envelope, where the choice ends, if `receipt` is set; see docs/exactness.md."""


class CompletionChoice(_Choice, PromptTokens):
    text: str
    logprobs: CompletionLogProbs | None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    """None: the answer is nothing but thoughts and calls."""
    reasoning_content: str | None = None
    """What the model thought, also under the name `reasoning`."""
    tool_calls: list[ToolCall] | None = None
    """It is there when the answer calls tools."""


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogProbs | None


class SpeculativeDecodingMetrics(BaseModel):
    """Counts over the passes for which something was drafted; of a tree all branches count as drafted."""

    mean_acceptance_length: float
    """Tokens per such pass, the target's own included: 1 + num_accepted_draft_tokens / num_spec_steps."""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """Entry j is the number of passes that accepted j drafted tokens."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """The most tokens that were drafted for one pass; the histogram has one entry more."""


class ResponseMetrics(BaseModel):
    """Times in milliseconds, each without those before it."""

    time_to_first_token_ms: float
    """From the end of the wait in the queue."""
    generation_time_ms: float
    """From the first tokens to the last ones."""
    queue_time_ms: float
    mean_itl_ms: float | None
    """None for a text of one token."""
    tokens_per_second: float | None
    """All tokens over all time but the queue's."""
    speculative_decoding: SpeculativeDecodingMetrics


class _Response(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    """The snapshot that drafted, and the fingerprint of all that a text depends on besides the request."""
    usage: Usage | None = None
    """In a stream only the last chunk has it, if `stream_options.include_usage` is set."""
    omnidraft: dict[str, Any] | None = Field(None)
    """Statistics of speculation, the snapshot's version and the seed of each choice, if `figures` is set."""
    metrics: ResponseMetrics | None = None
    """Times and acceptance in vLLM's shape; None for several choices. In a stream the chunk of the usage has it."""


class Completion(_Response):
    """A chunk of a stream looks the same."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(_Response, PromptTokens):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Seconds since 1970 at which it was first served here."""
    owned_by: str = "omnidraft"
    max_model_len: int
    """The most tokens that prompt and answer may have together, under vLLM's name."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
    models: tuple[()] = ()
    """Codex looks here, and an entry would have to replace its instructions to the model."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every 4xx and 5xx."""

    error: ErrorDetail


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Return an error object; a lone surrogate of a client's text is shown as its escape."""
    printable = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": printable, "type": kind, "param": param, "code": code}}


class Health(BaseModel):
    status: str


Responses = dict[int | str, dict[str, Any]]

DESCRIPTIONS = {
    400: "A field is missing, unknown or out of its range, or the body is no JSON.",
    401: "No such key, or none.",
    403: "`user` names the tenant of another API key.",
    404: "No such model here.",
    413: "The body is larger than worker.max_body_bytes.",
    429: "Too many requests wait; Retry-After says when to come again.",
    500: "Decoding failed.",
    503: "The worker is stopping; ask another one.",
}


def error_responses(*statuses: int, error: type[BaseModel] = ErrorBody) -> Responses:
    """Return the responses that are errors, in OpenAI's shape or in another one."""
    return {status: {"model": error, "description": DESCRIPTIONS[status]} for status in statuses}


def generation_responses(
    events: str, whole: type[BaseModel] | None = None, error: type[BaseModel] = ErrorBody
) -> Responses:
    """Return the responses of an endpoint that answers whole or streamed; of a stream, the schema of each event.

    Args:
        events: what a stream has, in words.
        whole: None where the protocol's own reference describes the answer.
    """
    fields = {"event": {"type": "string"}, "data": {"type": "string"}}
    event = {"type": "object", "required": ["data"], "properties": fields, "description": f"Of a stream: {events}."}
    ok = {
        "model": whole or dict[str, Any],
        "description": "The answer.",
        "content": {"text/event-stream": {"schema": event}},
    }
    return {200: ok, **error_responses(400, 404, 413, 429, 500, 503, error=error)}
