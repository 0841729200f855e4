"""What clients send, in OpenAI's words, and how it becomes a Question."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from omnidraft.decode.engine import Question
from omnidraft.ports import Sampling

MAX_SEED = 2**63 - 1


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "user", "assistant"]
    content: str


class StreamOptions(BaseModel):
    include_usage: bool = False


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
        )

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
