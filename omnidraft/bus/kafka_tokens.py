"""The tokens with which Kafka's clients log in by OAUTHBEARER.

They come from an OAuth 2.0 endpoint, by the grant of client credentials, or from a file that somebody else renews.
Source: https://www.rfc-editor.org/rfc/rfc6749#section-4.4
"""

import json
import logging
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
from kafka.errors import KafkaConnectionError
from kafka.net.sasl.oauth import AbstractTokenProvider
from pydantic import BaseModel, Field, ValidationError

from omnidraft.config import KafkaSettings

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""The client's thread waits for the endpoint, and meanwhile sends nothing."""
RENEWED_AFTER = 0.8
"""The part of a token's life after which another is fetched. A client logs in again after 0.85 of it at the earliest,
and the broker ends a connection whose client is late."""


class _TokenResponse(BaseModel):
    """The part that is read of an endpoint's response."""

    access_token: str = Field(min_length=1)
    expires_in: float = 0.0
    """Seconds; an endpoint that names none is asked at each login."""


class OAuthTokens(AbstractTokenProvider):  # type: ignore[misc]
    """The tokens of one client, for its one thread."""

    def __init__(self, access: KafkaSettings) -> None:
        self._access = access
        self._token = ""
        self._renew_s = self._end_s = 0.0
        """By the monotonic clock."""

    def token(self) -> str:
        """Return a token that is still valid, another one when its end is near. Raises KafkaConnectionError."""
        now_s = time.monotonic()
        if now_s >= self._renew_s:
            try:
                response = self._fetch()
                self._token, life_s = response.access_token, response.expires_in
                self._renew_s, self._end_s = now_s + RENEWED_AFTER * life_s, now_s + life_s
            except (httpx.HTTPError, OSError) as exc:
                message = f"no token from {self._access.token_url}: {exc}"
                if now_s >= self._end_s:
                    raise KafkaConnectionError(message) from exc
                logger.warning("%s; the one before is valid for %.0f s yet", message, self._end_s - now_s)
        return self._token

    def extensions(self) -> dict[str, str]:
        """See AbstractTokenProvider."""
        return self._access.token_extensions

    def _fetch(self) -> _TokenResponse:
        """Return a new token. Raises HTTPError, OSError."""
        url = urlsplit(self._access.token_url or "")
        if url.scheme == "file":
            response = json.dumps({"access_token": Path(unquote(url.path)).read_text().strip()}).encode()
        else:
            response = self._ask(url.geturl())
        try:
            return _TokenResponse.model_validate_json(response)
        except ValidationError:
            raise httpx.HTTPError("there is none in it") from None  # the cause would show what was in it

    def _ask(self, url: str) -> bytes:
        """Return the endpoint's response. Raises HTTPError."""
        access = self._access
        scope = {"scope": access.token_scope} if access.token_scope else {}
        secret = access.password.get_secret_value() if access.password else ""
        form, login = {"grant_type": "client_credentials", **scope}, (access.username or "", secret)
        response = httpx.post(url, data=form, auth=login, timeout=TIMEOUT_S)
        if not response.is_success:
            raise httpx.HTTPError(f"it answers {response.status_code} {response.reason_phrase}")
        return response.content
