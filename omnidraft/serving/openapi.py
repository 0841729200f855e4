"""The OpenAPI document: every status that an endpoint answers with, and nothing that it does not."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from omnidraft.serving.response_schemas import ErrorBody

Responses = dict[int | str, dict[str, Any]]

REASONS = {
    400: "A field is missing, unknown or out of its range, or the body is no JSON.",
    401: "No such API key.",
    404: "No such model here.",
    413: "The body is larger than worker.max_body_bytes.",
    429: "Too many requests wait; Retry-After says when to come again.",
    500: "Decoding failed.",
    503: "The worker is stopping; ask another one.",
}
NEVER_SENT = "422"
"""What FastAPI documents for bodies that do not validate; here they are 400."""


def refusals(*statuses: int) -> Responses:
    """Errors in OpenAI's shape."""
    return {status: {"model": ErrorBody, "description": REASONS[status]} for status in statuses}


def answers(whole: type[BaseModel], chunk: type[BaseModel]) -> Responses:
    """Of an endpoint that answers whole or streamed."""
    stream = {"schema": {"type": "string", "description": f"Server-sent events: {chunk.__name__}, then [DONE]."}}
    ok = {"model": whole, "description": "The answer.", "content": {"text/event-stream": stream}}
    return {200: ok, **refusals(400, 404, 413, 429, 500, 503)}


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Make the document say what is true of this application."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        made = generate()
        for path, operations in made["paths"].items():
            for operation in operations.values():
                operation["responses"].pop(NEVER_SENT, None)
                if has_keys and path.startswith("/v1"):
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = _refusal_of_key()
        if has_keys:
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return made

    app.openapi = document  # type: ignore[method-assign]


def _refusal_of_key() -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
    return {"description": REASONS[401], "content": {"application/json": {"schema": schema}}}
