"""Ends a stream whose worker died, with the events that a worker itself ends a stream of that API with.

The module imports no model code, so that Ray Serve's ingress, which has no models, can use it.
"""

import json
from collections.abc import Mapping
from typing import Any

from omnidraft.serving.anthropic_messages.errors import anthropic_error_event, is_anthropic
from omnidraft.serving.openai_responses import events as responses
from omnidraft.serving.openai_responses.response_schemas import ResponseBody, ResponseError
from omnidraft.serving.server_sent_events import event, last_error_events

PAGE_PATHS = "/page/"
"""The prefix of the paths of the page's streams."""


class StreamFollower:
    """Follows the pieces of one response, each of whole events."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._first = b""
        self._num_events = 0

    def take(self, piece: bytes) -> bytes:
        """Note a piece and return it."""
        self._first = self._first or piece
        self._num_events += piece.count(b"\n\n")
        return piece

    def error_events(self, content: Mapping[str, Any]) -> bytes:
        """Return the events that end the stream after the pieces so far, given an error of OpenAI's shape."""
        if is_anthropic(self._path):
            return anthropic_error_event(500, content)
        if self._path == responses.PATH:
            error = ResponseError(code="server_error", message=content["error"]["message"])
            return responses.failed_event(self._created_response(), error, self._num_events)
        return event("error", content) if self._path.startswith(PAGE_PATHS) else last_error_events(content)

    def _created_response(self) -> ResponseBody:
        """Return the response of response.created, the first event of its stream."""
        data = self._first.split(b"\n")[1].removeprefix(b"data: ")
        return ResponseBody.model_validate(json.loads(data)["response"])
