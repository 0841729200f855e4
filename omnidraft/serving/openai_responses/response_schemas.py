"""Bodies and events of OpenAI's Responses API; the OpenAPI document shows these models, and responses are made of
them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from omnidraft.serving.event_stream import event

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ErrorCode = Literal["server_error", "invalid_prompt"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputCall, Field(discriminator="type")]


class InputTokensDetails(BaseModel):
    cached_tokens: int
    """Tokens that were not read again, since an earlier request began with them."""
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    code: ErrorCode
    """invalid_prompt: the request asks for what cannot be served."""
    message: str


class ResponseBody(BaseModel):
    """A response; the fields of the request are told back."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    """It is there when the response has ended."""
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    store: Literal[False] = False
    """No response is kept."""
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"


PATH = "/v1/responses"


def response_event(name: str, number: int, content: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return event(name, {"type": name, "sequence_number": number, **content})


def failed_event(response: ResponseBody, error: ResponseError, number: int) -> bytes:
    """Return the event that ends the stream of a response that failed."""
    failed = response.model_copy(update={"status": "failed", "error": error})
    return response_event("response.failed", number, {"response": failed})
