"""A small client of servers with OpenAI's HTTP API, ours and others': one request, its answer whole or streamed."""

import json
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from omnidraft.errors import OmnidraftError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_EVENT, _LAST_LINE = "data: ", "data: [DONE]"
_CONNECT_TIMEOUT_S = 10.0
"""Where an answer itself may take as long as it likes."""


class ApiError(OmnidraftError):
    """The server refused the request or failed while it answered.

    Args:
        status: HTTP status code; None for an error within a stream.
        retry_after_s: the response's Retry-After header, where it has a number of seconds.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class ConnectionLost(ApiError):
    """The connection could not be opened, or broke before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response."""

    body: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return text_of(self.body)

    @property
    def stats(self) -> Mapping[str, Any]:
        """The decoding statistics that our server adds when a request asks for `figures`."""
        stats: Mapping[str, Any] = self.body["omnidraft"]
        return stats


def text_of(body: Mapping[str, Any]) -> str:
    """Return the text of the first choice of a response or of one event of a stream; "" when it has no choices."""
    for choice in body["choices"]:
        message = choice.get("message") or choice.get("delta")
        text: str | None = choice["text"] if message is None else message.get("content")
        return text or ""
    return ""


class OpenAIClient(AbstractContextManager["OpenAIClient"]):
    """Sends requests over connections that stay open, from any number of threads."""

    def __init__(self, url: str, *, timeout_s: float | None, key: str | None = None) -> None:
        self._http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(timeout_s, connect=timeout_s or _CONNECT_TIMEOUT_S),
            limits=httpx.Limits(),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the models that it serves. Raises ApiError, ConnectionLost."""
        try:
            return [each["id"] for each in self._request("GET", "/v1/models")["data"]]
        except (ValueError, LookupError, TypeError) as exc:
            raise ApiError(f"{self._url('/v1/models')} does not answer as a server of models: {exc}") from exc

    def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send a request and return its complete response. Raises ApiError, ConnectionLost."""
        return Reply(self._request("POST", path, body))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        """Send a request and yield the events of its stream as they come. Raises ApiError, ConnectionLost."""
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if line == _LAST_LINE:
                        return
                    if line.startswith(_EVENT):
                        yield _event(line)
        except httpx.TransportError as exc:
            raise ConnectionLost(f"{self._url(path)}: {exc!r}") from exc
        raise ConnectionLost(f"{self._url(path)}: the stream ended before its last event")

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as exc:
            raise ConnectionLost(f"{self._url(path)}: {exc!r}") from exc
        if response.status_code != 200:
            raise _refusal(response)
        content: Mapping[str, Any] = response.json()
        return content

    def _url(self, path: str) -> str:
        return f"{str(self._http.base_url).rstrip('/')}{path}"


def _event(line: str) -> Mapping[str, Any]:
    """Return the event on a line of a stream. Raises ApiError when it is an error."""
    event: Mapping[str, Any] = json.loads(line.removeprefix(_EVENT))
    if "error" in event:
        raise ApiError(event["error"]["message"])
    return event


def _refusal(response: httpx.Response) -> ApiError:
    """Return the error of a response whose body was read."""
    retry_after = response.headers.get("retry-after", "")
    return ApiError(
        f"{response.request.url}: status {response.status_code}: {_reason(response)}",
        response.status_code,
        float(retry_after) if retry_after.isdigit() else None,
    )


def _reason(response: httpx.Response) -> str:
    if response.next_request is not None:
        return f"points to {str(response.next_request.url).partition('/v1/')[0]}; take that URL instead"
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return response.text[:300]
    return message
