"""Tokens of texts and texts of tokens, in vLLM's shapes: `/tokenize` and `/detokenize`.

Prompts are tokenized, and answers written, beside decoding and the event loop, and clients take turns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from omnidraft.decode.prompting import client_texts, prompt_bytes, prompt_ids
from omnidraft.errors import RequestError
from omnidraft.params import MAX_COUNT, require_text
from omnidraft.serving.answer import Body, ServedModel
from omnidraft.serving.body_model import BodyModel
from omnidraft.serving.fair_queue import FairTurns
from omnidraft.serving.request_parts import RequestMessage, Tools
from omnidraft.serving.request_schemas import CompletionRequest, chat_request
from omnidraft.serving.response_formats import token_text
from omnidraft.serving.response_schemas import error_responses
from omnidraft.serving.responses import Responder

_Result = TypeVar("_Result")


class TokenizeRequest(BodyModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Field(fail_fast=True)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    """Whether a prompt begins as that of /v1/completions, with the target's own first token if it has one."""
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False

    def body(self) -> Body:
        """Return the request whose prompt is tokenized. Raises RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages")
        if self.prompt is not None and self.tools:
            raise RequestError("tools: they are for messages, not for a plain prompt")
        if self.prompt is not None:
            return CompletionRequest(model=self.model, prompt=self.prompt, add_special_tokens=self.add_special_tokens)
        dumped = {"messages": self.messages, "tools": self.tools, "model": self.model}
        return chat_request(dumped)


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    """The most tokens that prompt and answer may have together."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BodyModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    prompt: str


class Tokenization:
    """Tokenizes the prompts of requests as decoding does."""

    def __init__(self, respond: Responder) -> None:
        self._respond = respond
        self._turns = FairTurns()

    async def prompt_ids(self, request: Request, body: Body) -> list[int]:
        """Return the ids of the first prompt of a request. Raises RequestError."""
        pair, tenant = self._respond.model(body.model).engine.pair, self._respond.tenant_of(request, body)
        (first, *_) = body.generation_requests(tenant, None)
        require_text(client_texts(first))
        work = partial(prompt_ids, first, pair.target_tokenizer, pair.tool_format)
        return await self.in_turn(request, work, prompt_bytes(first))

    async def in_turn(self, request: Request, work: Callable[[], _Result], num_bytes: int) -> _Result:
        """See FairTurns.run."""
        return await self._turns.run(self._respond.client_of(request), work, num_bytes)


def add_tokenization(app: FastAPI, respond: Responder, tokenization: Tokenization) -> None:
    """Add the routes to the application."""

    @app.post("/tokenize", response_model=TokenizeResponse, responses=error_responses(400, 404, 413, 500))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a prompt, or of messages in the target's chat template."""
        chat, model = body.body(), respond.model(body.model)
        ids = [] if body.prompt == "" else await tokenization.prompt_ids(request, chat)
        content = partial(_tokens_content, ids, model, has_strings=body.return_token_strs)
        return _json_response(await tokenization.in_turn(request, content, len(ids)))

    @app.post("/detokenize", response_model=DetokenizeResponse, responses=error_responses(400, 404, 413, 500))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens; bytes that are not UTF-8 are replaced, and special tokens spell nothing."""
        content = partial(_text_content, body.tokens, respond.model(body.model))
        return _json_response(await tokenization.in_turn(request, content, len(body.tokens)))


def _json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _tokens_content(ids: Sequence[int], model: ServedModel, *, has_strings: bool) -> bytes:
    """Return a TokenizeResponse as JSON."""
    strings = [token_text(token, model.vocabulary) for token in ids] if has_strings else None
    limit = model.engine.decoder.target.context_limit
    return to_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


def _text_content(tokens: Sequence[int], model: ServedModel) -> bytes:
    """Return a DetokenizeResponse as JSON. Raises RequestError."""
    size = len(model.vocabulary)
    if (unknown := next((token for token in tokens if token >= size), None)) is not None:
        raise RequestError(f"tokens: {unknown} is none of the {size} of {model.name!r}")
    return to_json({"prompt": model.vocabulary.spell(tokens).decode("utf-8", "replace")})
