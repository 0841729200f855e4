"""Endpoints of OpenAI's that clients look for and that are not here: each says so instead of a bare 404."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, HTTPException

_REASONS: Mapping[str, str] = {
    "/v1/embeddings": "embeddings are not served here: the models generate text. Ask a server with an embedding model",
    "/v1/responses/{rest:path}": "no response is kept: the server is stateless. Send the whole conversation as `input`",
}


def add_missing(app: FastAPI) -> None:
    """Add routes that refuse every request with the reason; the OpenAPI document does not have them."""
    for path, reason in _REASONS.items():
        app.add_api_route(path, _refusing(reason), methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _refusing(reason: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise HTTPException(404, reason)

    return refuse
