"""Structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and fair turns at compiling grammars."""

import json
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import RequestError
from omnidraft.ports import Grammar
from omnidraft.serving.fair_queue import FairTurns
from omnidraft.serving.strict_model import JsonObject, StrictModel


class JsonSchema(StrictModel):
    """OpenAI's wrapping; the schema is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return Grammar("json_schema", json.dumps(self.json_schema.schema_ if self.json_schema else {"type": "object"}))


class StructuredOutputs(StrictModel):
    """vLLM's own way to ask for a grammar."""

    regex: str | None = None
    json_: JsonObject | None = Field(None, alias="json")

    def grammar(self) -> Grammar | None:
        if self.regex is not None and self.json_ is not None:
            raise RequestError("structured_outputs: give either regex or json")
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.json_ is None else Grammar("json_schema", json.dumps(self.json_))


class GrammarScheduler:
    """Compiles one grammar at a time, beside the event loop and beside decoding, and lets clients take turns."""

    def __init__(self) -> None:
        self._turns = FairTurns()

    async def prepare(
        self, client: str, cache_scope: str, engine: Engine, request: GenerationRequest
    ) -> GenerationRequest:
        """Return the request with its grammar compiled. Raises RequestError when that cannot be done."""
        if request.sampling.grammar is None and request.tools is None:
            return request
        prepare = partial(engine.prepare, request, client=client, cache_scope=cache_scope)
        return await self._turns.run(client, prepare)
