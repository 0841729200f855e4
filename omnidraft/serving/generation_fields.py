"""The fields that OpenAI's chats and completions share, vLLM's extensions among them, and their conversion into
generation requests.

A field that is not here is ignored and told of; see body_model.py. What would change the text and cannot be done is
refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict, model_validator

from omnidraft.decode.generation import GenerationRequest, choices
from omnidraft.errors import RequestError
from omnidraft.params import MAX_COUNT, UNSAID, SamplingNumbers, sampling_of
from omnidraft.ports import Grammar, Mode
from omnidraft.serving.body_model import (
    MAPPING_LIMITS,
    BodyModel,
    RequestFields,
    TextMapping,
    Texts,
    as_list,
    refuse,
    with_sampling,
)
from omnidraft.serving.request_parts import GUIDED, ResponseFormat, StructuredOutputs

MAX_STOPS = 64
Stop = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), as_list(str | list[str])]
MAX_USER_CHARACTERS = 512
NO_ZERO_BYTE = r"^[^\x00]*$"
"""Databases of tenants' keys cannot hold one."""
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1_000
MAX_N = 128
"""As at OpenAI."""
OTHER_NAMES = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "reasoning_budget_tokens": "thinking_token_budget",
    "thinking_budget_tokens": "thinking_token_budget",
    "thinking_budget": "thinking_token_budget",
}
"""Names of llama.cpp's, the last one of Qwen's own service, and ours for the same."""
NO_LIMIT = BeforeValidator(lambda value: None if value == -1 else value)
MaxTokens = Annotated[Annotated[int, Field(ge=1, le=MAX_COUNT)] | None, NO_LIMIT]
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


class OpenAIFields(RequestFields):
    """Fields of all APIs of OpenAI's."""

    user: str | None = Field(None, max_length=MAX_USER_CHARACTERS, pattern=NO_ZERO_BYTE)
    """Whose the request is, unless the API key says it."""
    metadata: TextMapping | None = None
    receipt: Literal["digests"] | bool = False
    """Answer with a signed receipt, by which anybody with the model can compute the answer again (`omnidraft verify`);
    `digests` puts digests of its ids into it. It needs the reproducible mode."""
    mode: Mode | None = None
    prediction: Prediction | None = None
    """What the answer will probably be, such as a file before an edit: it is drafted, and changes no text."""


@with_sampling("openai")
class GenerationFields(OpenAIFields):
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
    include_reasoning: bool = True
    """Whether the answer of a model that thinks has its thoughts, as in vLLM."""
    return_token_ids: bool = False
    """Tell the ids of the prompt and of the answer."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probabilities as `token_id:` and their id, as in vLLM."""
    use_beam_search: Annotated[bool, refuse(bool, "there is no beam search; draw `n` answers")] = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    """Choice 0 is the text that n = 1 gives."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Tell the log-probability of each token of the prompt and of so many likeliest ones, as vLLM."""
    ignore_eos: bool | None = None
    """True goes on behind the tokens that end a text, up to `max_tokens`, as in vLLM; for benchmarks."""
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

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def tells_all_tokens(self) -> bool:
        """Whether each token that was drawn is told, those that put nothing into the text too."""
        return self.return_token_ids or self.return_tokens_as_token_ids

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
        """The number of likeliest tokens that are told with each of the prompt; None scores no prompt."""
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        return len(self.prompts()) * (self.n or 1)

    def generation_requests(
        self, tenant: str, max_new_tokens: int | None, defaults: SamplingNumbers = UNSAID
    ) -> list[GenerationRequest]:
        """Return a request for each choice; see decode.generation.choices. Raises RequestError.

        Args:
            max_new_tokens: the deployment's ceiling, from the settings.
            defaults: the model's own sampling settings, for what the request does not say.
        """
        truncated, bias = self.truncate_prompt_tokens, self.logit_bias
        allowed, grammar = self.allowed_token_ids, self._grammar()
        sampling = sampling_of(self, logit_bias=bias, allowed_ids=allowed, grammar=grammar, defaults=defaults)
        return choices(
            self.prompts(),
            self.n or 1,
            seed=self.seed,
            num_prompt_log_probs=self.num_prompt_log_probs,
            max_new_tokens=min(filter(None, (self.num_tokens, max_new_tokens)), default=None),
            sampling=sampling,
            stop_strings=tuple(self.stop or ()),
            stop_ids=tuple(self.stop_token_ids or ()),
            keeps_stop=self.include_stop_str_in_output,
            min_new_tokens=self.min_tokens,
            bad_words=tuple(self.bad_words or ()),
            shows_special=not self.skip_special_tokens,
            max_prompt_tokens=MAX_COUNT if truncated == -1 else truncated or None,
            prediction=self.prediction.content if self.prediction else "",
            mode=self.mode,
            num_draft_tokens=self._num_draft_tokens(),
            num_log_probs=self.num_log_probs,
            ignores_eos=bool(self.ignore_eos),
            is_stored=self.store is not False,
            has_receipt=bool(self.receipt),
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
