"""Request bodies of OpenAI's API, and their conversion into generation requests; vLLM's extensions among their fields.

A field that is not here is ignored and told of; see body_model.py. What would change the text and cannot be done is
refused.
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
from omnidraft.serving.body_model import (
    MAPPING_LIMITS,
    TEXT_OR_LIST,
    BodyModel,
    JsonObject,
    RequestFields,
    Text,
    TextMapping,
    refuse,
    with_sampling,
)
from omnidraft.serving.request_parts import (
    GUIDED,
    Deprecated,
    RequestMessage,
    ResponseFormat,
    StructuredOutputs,
    Texts,
    ToolChoice,
    Tools,
    tools_offered,
)

MAX_STOPS = 64
Stop = Annotated[Text | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), Tag("list")], TEXT_OR_LIST]
MAX_USER_CHARACTERS = 512
NO_ZERO_BYTE = r"^[^\x00]*$"
"""Databases of tenants' keys cannot hold one."""
MAX_PROMPT_LOGPROBS = MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1_000
OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
"""llama.cpp's names, and ours for the same."""
MaxTokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_COUNT)] | None, BeforeValidator(lambda value: None if value == -1 else value)
]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(fail_fast=True)]


class StreamOptions(BodyModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far, as in vLLM."""


class Prediction(BodyModel):
    """OpenAI's Predicted Outputs."""

    type: Literal["content"] = "content"
    content: Texts

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class OpenAIFields(RequestFields):
    """Fields of all APIs of OpenAI's."""

    user: str | None = Field(None, max_length=MAX_USER_CHARACTERS, pattern=NO_ZERO_BYTE)
    """Whose the request is, unless the API key says it."""
    metadata: TextMapping | None = None
    prediction: Prediction | None = None
    """What the answer will probably be, such as a file before an edit: it is drafted, and changes no text."""


@with_sampling("openai")
class _GenerationParams(OpenAIFields):
    """Fields of both endpoints."""

    logit_bias: Annotated[dict[Annotated[int, Strict(False)], float], *MAPPING_LIMITS] | None = None
    """What is added to the logits of the target's ids, between -100 and 100."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: Stop | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT)
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_COUNT)
    """Read only the last so many tokens of the prompt; -1: as many as the context holds."""
    return_token_ids: bool = False
    """Tell the ids of the prompt and of the answer."""
    use_beam_search: Annotated[bool, refuse(bool, "there is no beam search; draw `n` answers")] = False
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

    @model_validator(mode="before")
    @classmethod
    def _reads_other_names(cls, value: Any) -> Any:
        """Take the names that vLLM had before, and those of SGLang and llama.cpp."""
        if not isinstance(value, dict):
            return value
        renamed = {new: value[old] for old, new in OTHER_NAMES.items() if old in value and new not in value}
        guided = {new: value[old] for old, new in GUIDED.items() if value.get(old) is not None}
        if guided and value.get("structured_outputs") is None:
            renamed["structured_outputs"] = guided
        others = {name: each for name, each in value.items() if name not in OTHER_NAMES and name not in GUIDED}
        return {**others, **renamed}

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
    def num_prompt_log_probs(self) -> int | None:
        """How many of the likeliest tokens are told with each of the prompt; None scores no prompt."""
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        return len(self.prompts()) * (self.n or 1)

    def generation_requests(self, tenant: str, max_new_tokens: int | None) -> list[GenerationRequest]:
        """Return a request for each choice; see decode.generation.choices. Raises RequestError.

        Args:
            max_new_tokens: the deployment's ceiling, from the settings.
        """
        truncated = self.truncate_prompt_tokens
        return choices(
            self.prompts(),
            self.n or 1,
            seed=self.seed,
            num_prompt_log_probs=self.num_prompt_log_probs,
            max_new_tokens=min(filter(None, (self.num_tokens, max_new_tokens)), default=None),
            sampling=sampling_of(
                self, logit_bias=self.logit_bias, allowed_ids=self.allowed_token_ids, grammar=self._grammar()
            ),
            stop_strings=tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            stop_ids=tuple(self.stop_token_ids or ()),
            keeps_stop=self.include_stop_str_in_output,
            min_new_tokens=self.min_tokens,
            bad_words=tuple(self.bad_words or ()),
            shows_special=not self.skip_special_tokens,
            max_prompt_tokens=MAX_COUNT if truncated == -1 else truncated or None,
            prediction=self.prediction.text if self.prediction else "",
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


def _as_one_prompt(given: Any) -> Any:
    """Return the ids of one prompt as a list of prompts."""
    return [given] if isinstance(given, list) and given and isinstance(given[0], int) else given


class CompletionRequest(_GenerationParams):
    prompt: Annotated[
        Text | Annotated[list[str | Ids], Field(min_length=1), Tag("list")],
        TEXT_OR_LIST,
        BeforeValidator(_as_one_prompt),
    ]
    """A text or the target's ids; of several, each has `n` choices."""
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_COUNT)] | None, BeforeValidator(lambda value: None if value == -1 else value)
    ] = None
    """A ceiling; without it, and with -1, the answer goes on to its end or that of the context."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Tell each token's log-probability and those of so many likeliest ones: the target's own, before sampling
    settings."""
    echo: bool = False
    """Answer with the prompt before the text, and with its log-probabilities where they are asked for."""
    add_special_tokens: bool = True
    """Whether the prompt begins with the target's own first token, if it has one."""
    parse_special: bool = False
    """Whether special tokens that are written in the prompt count as such: for prompts that a client has templated."""
    best_of: Annotated[int | None, refuse(lambda value: value not in (None, 1), "draw `n` answers instead")] = None
    suffix: str | None = None
    """The text behind the answer: a target that knows fill-in-the-middle fills the gap. "" is none."""

    @property
    def num_log_probs(self) -> int | None:
        return self.logprobs

    @property
    def num_tokens(self) -> int | None:
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def num_prompt_log_probs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    def prompts(self) -> Sequence[dict[str, Any]]:
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        shared = {"adds_special": self.add_special_tokens, "reads_special": self.parse_special}
        return [
            {"prompt": prompt, "suffix": self.suffix or None, **shared}
            if isinstance(prompt, str)
            else {"prompt_ids": tuple(prompt)}
            for prompt in prompts
        ]


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
    audio: Annotated[None, refuse(lambda value: value is not None, "the models here write text only")] = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Go on with the last message, which is the assistant's."""
    chat_template_kwargs: JsonObject | None = None
    """Further variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """It reaches the chat template; `none` also turns thinking off."""

    @property
    def num_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _template_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            options = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
        return options | (self.chat_template_kwargs or {})

    @property
    def num_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _has_what_it_refers_to(self) -> "ChatRequest":
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice: there are no tools to choose from")
        continues = self.continue_final_message or not self.add_generation_prompt
        if continues and (not self.messages or self.messages[-1].role != "assistant"):
            raise ValueError("continue_final_message: the last message is not the assistant's")
        return self

    def prompts(self) -> Sequence[dict[str, Any]]:
        tools = tools_offered(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)
        continues = self.continue_final_message or not self.add_generation_prompt
        return [
            {
                "messages": [message.plain() for message in self.messages],
                "tools": tools,
                "continues_last": continues,
                "template_options": self._template_options(),
            }
        ]


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
