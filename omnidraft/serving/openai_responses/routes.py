"""The route of OpenAI's Responses API."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from omnidraft.serving.answer import Answer
from omnidraft.serving.openai_responses.events import PATH
from omnidraft.serving.openai_responses.request_schemas import ResponsesRequest
from omnidraft.serving.openai_responses.response_schemas import ResponseBody
from omnidraft.serving.openai_responses.writer import ResponsesWriter
from omnidraft.serving.response_schemas import generation_responses
from omnidraft.serving.responses import Responder


def add_responses(app: FastAPI, respond: Responder) -> None:
    """Add the route to the application."""

    @app.post(PATH, responses=generation_responses(ResponseBody, "response.created to response.completed"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer `input` in the shape of OpenAI's Responses; see /v1/chat/completions for what stands behind it."""

        def writer_of(answer: Answer) -> ResponsesWriter:
            return ResponsesWriter(answer, body)

        return await respond(request, body.chat_request(), writer_of)
