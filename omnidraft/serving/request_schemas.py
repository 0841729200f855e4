"""Request bodies of OpenAI's chats and completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from omnidraft.errors import RequestError
from omnidraft.params import MAX_COUNT, ROWS
from omnidraft.serving.body_model import JsonObject, RequestFields, refuse
from omnidraft.serving.generation_fields import MAX_LOGPROBS, NO_LIMIT, GenerationFields, Ids, MaxTokens
from omnidraft.serving.request_parts import Chosen, Deprecated, RequestMessage, ToolChoice, Tools, tools_offered


def _prompts(given: Any) -> Any:
    """Return a list of prompts for one: a text, or ids."""
    is_one = isinstance(given, str) or (isinstance(given, list) and bool(given) and isinstance(given[0], int))
    return [given] if is_one else given


class CompletionRequest(GenerationFields):
    prompt: Annotated[
        list[str | Ids],
        Field(min_length=1),
        BeforeValidator(_prompts, json_schema_input_type=str | Ids | list[str | Ids]),
    ]
    """A text or the target's ids; of several, each has `n` choices."""
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_COUNT)] | None, NO_LIMIT] = None
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

    @model_validator(mode="after")
    def _has_an_answer_to_sign(self) -> "CompletionRequest":
        if self.receipt and self.max_tokens == 0:
            raise ValueError("receipt: max_tokens is 0, so there is no answer to sign")
        return self

    @property
    def tells_all_tokens(self) -> bool:
        return self.echo or super().tells_all_tokens

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
        shared = {"adds_special": self.add_special_tokens, "reads_special": self.parse_special}
        return [
            {"prompt": prompt, "suffix": self.suffix or None, **shared}
            if isinstance(prompt, str)
            else {"prompt_ids": tuple(prompt)}
            for prompt in self.prompt
        ]


class ChatRequest(GenerationFields):
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
    tool_choice: ToolChoice = Chosen()
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

    thinking_token_budget: Annotated[Annotated[int, Field(ge=0, le=MAX_COUNT)] | None, NO_LIMIT] = None
    """The tokens of thoughts after which a model that thinks has to answer, as in vLLM; none, and -1: no limit."""

    @property
    def num_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues_last(self) -> bool:
        """Whether the answer goes on with the last message."""
        return self.continue_final_message or not self.add_generation_prompt

    def _template_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            options = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
        if self.thinking_token_budget is not None:
            options["thinking_budget"] = self.thinking_token_budget
        return options | (self.chat_template_kwargs or {})

    @property
    def num_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _has_what_it_refers_to(self) -> "ChatRequest":
        if not self.tools and self.tool_choice.mode == "required":
            raise ValueError("tool_choice: there are no tools to choose from")
        if self.continues_last and (not self.messages or self.messages[-1].role != "assistant"):
            raise ValueError("continue_final_message: the last message is not the assistant's")
        return self

    def prompts(self) -> Sequence[dict[str, Any]]:
        tools = tools_offered(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)
        return [
            {
                "messages": [message.plain() for message in self.messages],
                "tools": tools,
                "continues_last": self.continues_last,
                "template_options": self._template_options(),
                "max_thought_tokens": self.thinking_token_budget,
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
