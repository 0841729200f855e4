"""Requests of OpenAI's chat completions and their responses: JSON lines, {"request": ..., "response": ...}.

Both are the bodies as they were sent and received; of their fields those are read that tell what a drafter can learn.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnidraft.errors import RequestError

Byte = Annotated[int, Field(ge=0, le=255)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class ApiToken(_Body):
    token: str
    bytes: list[Byte] | None = None
    """None where the server does not tell them."""
    logprob: float | None = None


class ApiPosition(ApiToken):
    """An emitted token and the likeliest ones in its place."""

    top_logprobs: list[ApiToken] | None = None


class ApiLogprobs(_Body):
    content: list[ApiPosition] | None = None


class ApiMessage(_Body):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class ApiChoice(_Body):
    message: ApiMessage
    logprobs: ApiLogprobs | None = None
    finish_reason: str | None = None


class ApiResponse(_Body):
    choices: list[ApiChoice] = []
    """Empty for an error."""


class ApiRequest(_Body):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class ApiExchange(_Body):
    """One request and its response."""

    request: ApiRequest
    response: ApiResponse


def read(path: Path, num: int | None = None, *, skip: int = 0) -> list[ApiExchange]:
    """Return up to `num` exchanges after the first `skip`.

    Raises:
        RequestError: the file cannot be read or holds something else; it names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"cannot read responses: {exc}") from exc
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    chosen = numbered[skip : None if num is None else skip + num]
    if not chosen:
        raise RequestError(f"{path} has no responses after the first {skip}")
    return [_exchange(path, number, line) for number, line in chosen]


def _exchange(path: Path, number: int, line: str) -> ApiExchange:
    try:
        return ApiExchange.model_validate_json(line)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(
            f'{path}:{number} needs a JSON object with "request" and "response" of chat completions: '
            f"{where}: {first['msg']}"
        ) from exc
