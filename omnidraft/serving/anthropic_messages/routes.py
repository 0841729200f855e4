"""The routes of Anthropic's Messages API."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from omnidraft.serving.anthropic_messages.errors import PATH, AnthropicError
from omnidraft.serving.anthropic_messages.request_schemas import CountTokensRequest, MessagesRequest
from omnidraft.serving.anthropic_messages.response_schemas import Message, TokenCount
from omnidraft.serving.anthropic_messages.writer import MessageWriter
from omnidraft.serving.error_handlers import ThreadRefused
from omnidraft.serving.response_schemas import error_responses, generation_responses
from omnidraft.serving.responses import Responder
from omnidraft.serving.tokenization import Tokenization


def add_messages(app: FastAPI, respond: Responder, tokenization: Tokenization) -> None:
    """Add the routes to the application."""

    @app.post(PATH, responses=generation_responses(Message, "message_start to message_stop", AnthropicError))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer messages in Anthropic's shape; see /v1/chat/completions for what stands behind it."""
        if body.thread is not None:
            raise ThreadRefused("thread: conversations are not kept here; send the whole of it")
        return await respond(request, body.chat_request(), MessageWriter)

    @app.post(f"{PATH}/count_tokens", responses=error_responses(400, 404, 413, 500, error=AnthropicError))
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Count the tokens of the prompt that these messages make."""
        ids = await tokenization.prompt_ids(request, body.chat_request())
        return TokenCount(input_tokens=len(ids))
