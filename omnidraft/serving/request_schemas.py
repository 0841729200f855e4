"""Request bodies of OpenAI's API, and their conversion into generation requests.

A field that is not here is refused by name, so that nobody believes it had an effect. OpenAI's fields without a
counterpart here are accepted with those values that change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    Strict,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from omnidraft.decode.generation import GenerationRequest, choices
from omnidraft.errors import RequestError
from omnidraft.params import MAX_COUNT, ROWS, sampling_of
from omnidraft.ports import Grammar, Mode
from omnidraft.serving.request_parts import (
    Deprecated,
    RequestMessage,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    Tools,
    tools_offered,
)
from omnidraft.serving.strict_model import (
    MAPPING_LIMITS,
    TEXT_OR_LIST,
    RequestFields,
    StrictModel,
    Text,
    TextMapping,
    refuse,
    with_null,
    with_sampling,
)

MAX_STOPS = 16
Stop = Annotated[Text | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), Tag("list")], TEXT_OR_LIST]
MAX_USER_CHARACTERS = 256
NO_ZERO_BYTE = r"^[^\x00]*$"
"""Databases of tenants' keys cannot hold one."""
MAX_PROMPT_LOGPROBS = 20
MaxTokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_COUNT)] | None, BeforeValidator(lambda value: None if value == -1 else value)
]


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far, as in vLLM."""


NULL_OF_OPENAI = ("prompt_cache_retention", "prompt_cache_options", "moderation")
"""Fields without a counterpart here; see strict_model.with_null."""


class OpenAIFields(RequestFields):
    """Fields of all APIs of OpenAI's."""

    user: str | None = Field(None, max_length=MAX_USER_CHARACTERS, pattern=NO_ZERO_BYTE)
    """Whose the request is, unless the API key says it."""
    metadata: TextMapping | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None


@with_sampling("openai")
class _GenerationParams(OpenAIFields):
    """Fields of both endpoints."""

    logit_bias: Annotated[dict[Annotated[int, Strict(False)], float], *MAPPING_LIMITS] | None = None
    """What is added to the logits of the target's ids, between -100 and 100."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Choice 0 is the text that n = 1 gives."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_PROMPT_LOGPROBS)
    """Tell the log-probability of each token of the prompt and of so many likeliest ones, as vLLM; not in a stream."""
    ignore_eos: bool | None = None
    """True goes on behind the tokens that end a text, up to `max_tokens`, as in vLLM; for benchmarks."""
    mode: Mode | None = None
    figures: bool = False
    """Answer with what speculation did, as `omnidraft`."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_USER_CHARACTERS)
    """Requests reuse the keys of common prefixes only of requests with the same salt, as in vLLM."""

    @model_validator(mode="after")
    def _is_whole_with_prompt_logprobs(self) -> "_GenerationParams":
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not in a stream")
        return self

    @field_validator("stream_options")
    @classmethod
    def _are_for_a_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("they need stream: true")
        return options

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_log_probs(self) -> int | None:
        raise NotImplementedError

    @property
    def num_tokens(self) -> int | None:
        """The requested maximum; None: no limit."""
        raise NotImplementedError

    def prompts(self) -> Sequence[dict[str, Any]]:
        """Return the fields of a GenerationRequest that differ between prompts."""
        raise NotImplementedError

    @property
    def num_choices(self) -> int:
        return len(self.prompts()) * (self.n or 1)

    def generation_requests(self, tenant: str, max_new_tokens: int | None) -> list[GenerationRequest]:
        """Return a request for each choice; see decode.generation.choices. Raises RequestError.

        Args:
            max_new_tokens: the deployment's ceiling, from the settings.
        """
        return choices(
            self.prompts(),
            self.n or 1,
            seed=self.seed,
            num_prompt_log_probs=self.prompt_logprobs,
            max_new_tokens=min(filter(None, (self.num_tokens, max_new_tokens)), default=None),
            sampling=sampling_of(self, logit_bias=self.logit_bias, grammar=self._grammar()),
            stop_strings=tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            mode=self.mode,
            num_draft_tokens=self._num_draft_tokens(),
            num_log_probs=self.num_log_probs,
            ignores_eos=bool(self.ignore_eos),
            is_stored=self.store is not False,
            tenant=tenant,
        )

    def _num_draft_tokens(self) -> int | None:
        if self.speculation == "auto":
            return None
        return 0 if self.speculation == "off" else self.speculation

    def _grammar(self) -> Grammar | None:
        fields = (self.response_format, self.structured_outputs)
        grammars = [grammar for field in fields if field is not None and (grammar := field.grammar()) is not None]
        if len(grammars) > 1:
            raise RequestError("give either response_format or structured_outputs")
        return grammars[0] if grammars else None


class CompletionRequest(_GenerationParams):
    prompt: Annotated[
        Text | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("list")],
        TEXT_OR_LIST,
        refuse(
            lambda value: isinstance(value, list) and isinstance(next(iter(value), None), int | list),
            "no token ids are taken: send their text, which /detokenize returns",
        ),
    ]
    """Of several, each has `n` choices."""
    max_tokens: MaxTokens = None
    """A ceiling; without it, and with -1, the answer goes on to its end or that of the context."""
    logprobs: int | None = Field(None, ge=0, le=5)
    """Tell each token's log-probability and those of so many likeliest ones: the target's own, before sampling
    settings."""
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: str | None = None
    """The text behind the answer: a target that knows fill-in-the-middle fills the gap. "" is none."""

    @property
    def num_log_probs(self) -> int | None:
        return self.logprobs

    @property
    def num_tokens(self) -> int | None:
        return self.max_tokens

    def prompts(self) -> Sequence[dict[str, Any]]:
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [{"prompt": prompt, "suffix": self.suffix or None} for prompt in prompts]


@with_null("reasoning_effort", "verbosity", "prediction", "audio", "web_search_options", *NULL_OF_OPENAI)
class ChatRequest(_GenerationParams):
    messages: Annotated[list[RequestMessage], Field(fail_fast=True)]
    max_tokens: MaxTokens = None
    """A ceiling; without it, and with -1, the answer goes on to its end or that of the context."""
    max_completion_tokens: MaxTokens = None
    """The same as `max_tokens`, and goes before it."""
    logprobs: bool | None = None
    """Tell each token's log-probability: the target's own, before sampling settings."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """... and those of so many likeliest ones."""
    tools: Tools | None = None
    """What the model may call."""
    tool_choice: ToolChoice | None = None
    """auto, if it is not given: the model answers or calls."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    functions: Deprecated = None
    function_call: Deprecated = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def num_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _has_what_it_refers_to(self) -> "ChatRequest":
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice: there are no tools to choose from")
        known: set[str] = set()
        for index, message in enumerate(self.messages):
            known.update(call.id for call in message.tool_calls or ())
            if message.tool_call_id is not None and message.tool_call_id not in known:
                raise ValueError(f"messages.{index}.tool_call_id: no call of this id before it")
        return self

    def prompts(self) -> Sequence[dict[str, Any]]:
        tools = tools_offered(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)
        return [{"messages": [message.plain() for message in self.messages], "tools": tools}]


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
