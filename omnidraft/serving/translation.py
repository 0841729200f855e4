"""From the requests of other protocols to chat requests, which all of them become."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from omnidraft.errors import RequestError
from omnidraft.params import ROWS
from omnidraft.serving.request_schemas import ChatRequest
from omnidraft.serving.strict_model import RequestFields


def same_fields(body: RequestFields, shared: type[RequestFields]) -> dict[str, Any]:
    """Return the fields that a chat request has under the same names: those of `shared` and the sampling settings."""
    return {name: getattr(body, name) for name in (*shared.model_fields, *ROWS) if hasattr(body, name)}


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request with these fields; those that are None are left out.

    Raises:
        RequestError: they contradict each other, as a result of a call that nobody made.
    """
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as exc:
        raise RequestError(exc.errors()[0]["msg"].removeprefix("Value error, ")) from exc
