"""The OpenAPI document: exactly the statuses that each endpoint answers with."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from omnidraft.serving.response_schemas import ErrorBody

Responses = dict[int | str, dict[str, Any]]

DESCRIPTIONS = {
    400: "A field is missing, unknown or out of its range, or the body is no JSON.",
    401: "No such API key.",
    404: "No such model here.",
    413: "The body is larger than worker.max_body_bytes.",
    429: "Too many requests wait; Retry-After says when to come again.",
    500: "Decoding failed.",
    503: "The worker is stopping; ask another one.",
}
NEVER_SENT = "422"
"""The status that FastAPI documents for bodies that do not validate; here they are 400."""


def error_responses(*statuses: int) -> Responses:
    """Return the responses that are errors in OpenAI's shape."""
    return {status: {"model": ErrorBody, "description": DESCRIPTIONS[status]} for status in statuses}


def completion_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> Responses:
    """Return the responses of an endpoint that answers whole or streamed."""
    stream = {"schema": {"type": "string", "description": f"Server-sent events: {chunk.__name__}, then [DONE]."}}
    ok = {"model": whole, "description": "The answer.", "content": {"text/event-stream": stream}}
    return {200: ok, **error_responses(400, 404, 413, 429, 500, 503)}


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Correct the document that FastAPI generates for this application."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        generated = generate()
        for path, operations in generated["paths"].items():
            for operation in operations.values():
                operation["responses"].pop(NEVER_SENT, None)
                if has_keys and path.startswith("/v1"):
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = _unauthorized()
        if has_keys:
            generated["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return generated

    app.openapi = document  # type: ignore[method-assign]


def _unauthorized() -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
    return {"description": DESCRIPTIONS[401], "content": {"application/json": {"schema": schema}}}
