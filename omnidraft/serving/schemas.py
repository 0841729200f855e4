"""What clients send, in OpenAI's words, and how it becomes a Question."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omnidraft.decode.engine import Question
from omnidraft.errors import RequestError
from omnidraft.ports import Grammar, Sampling

MAX_SEED = 2**63 - 1


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "user", "assistant"]
    content: str


class StreamOptions(BaseModel):
    include_usage: bool = False


class JsonSchema(BaseModel):
    """OpenAI's wrapping; the schema is always kept to, whatever `strict` says."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
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


class StructuredOutputs(BaseModel):
    """vLLM's own way to ask for a grammar."""

    model_config = ConfigDict(extra="forbid")
    regex: str | None = None
    json_: dict[str, Any] | None = Field(None, alias="json")

    def grammar(self) -> Grammar | None:
        if self.regex is not None and self.json_ is not None:
            raise RequestError("structured_outputs: give either regex or json")
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.json_ is None else Grammar("json_schema", json.dumps(self.json_))


class _Asked(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    """What is added to the logits of the target's ids; ranges of these five: see decode/sampling_limits.py."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str | None = None
    store: bool = True
    """False keeps the request out of the traces the drafter learns from."""
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0)] = "auto"
    """off, or the number of tokens drafted per pass; auto takes the deployment's."""
    mode: Literal["fast", "reproducible"] | None = None

    def _num_draft_tokens(self) -> int | None:
        if self.speculation == "auto":
            return None
        return 0 if self.speculation == "off" else self.speculation

    def _sampling(self) -> Sampling:
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.logit_bias or {},
            self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        asked = [part.grammar() for part in (self.response_format, self.structured_outputs) if part is not None]
        grammars = [grammar for grammar in asked if grammar is not None]
        if len(grammars) > 1:
            raise RequestError("give either response_format or structured_outputs")
        return grammars[0] if grammars else None

    def _question(
        self, max_new_tokens: int, tenant: str, prompt: str | None, messages: list[Message] | None
    ) -> Question:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Question(
            prompt=prompt,
            messages=None if messages is None else [message.model_dump() for message in messages],
            max_new_tokens=max_new_tokens,
            sampling=self._sampling(),
            seed=self.seed,
            stop_strings=tuple(stops),
            mode=self.mode,
            num_draft_tokens=self._num_draft_tokens(),
            is_stored=self.store,
            tenant=self.user or tenant,
        )


class CompletionRequest(_Asked):
    prompt: str
    max_tokens: int = Field(256, ge=1)

    def question(self, tenant: str) -> Question:
        return self._question(self.max_tokens, tenant, self.prompt, None)


class ChatRequest(_Asked):
    messages: list[Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def num_new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 256

    def question(self, tenant: str) -> Question:
        return self._question(self.num_new_tokens, tenant, None, self.messages)
