"""What a client asks to be generated, in text."""

import secrets
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omnidraft.decode.sampling.noise import choice_seed
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.params import require_integer, unsigned_seed
from omnidraft.ports import Mode, Sampling, Step, Target
from omnidraft.tools.tool_use import ToolUse
from omnidraft.traces.request_ids import answer_id


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request in text; None takes the deployment's setting."""

    prompt: str | None = None
    """Plain text to continue; exactly one of prompt, prompt_ids and messages is given."""
    prompt_ids: tuple[int, ...] | None = None
    """The target's ids to continue."""
    max_prompt_tokens: int | None = None
    """Of a longer prompt only its last so many ids are read."""
    reads_special: bool = False
    """Whether special tokens that are written into a plain prompt count as such."""
    adds_special: bool = True
    """Whether a plain prompt begins with the target's own first token, if it has one."""
    suffix: str | None = None
    """The text behind the answer, which then fills the gap between both; with a prompt, which may be empty."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """As OpenAI has them, with calls of tools and their results."""
    tools: ToolUse | None = None
    """The tools that the answer may call."""
    continues_last: bool = False
    """Whether the answer goes on with the last message, which is the assistant's."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""
    max_new_tokens: int | None = None
    """A ceiling, which the context lowers to what it holds after the prompt; None: as much as it holds."""
    max_thought_tokens: int | None = None
    """The tokens of thoughts after which a model that thinks has to answer; None: no limit."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    """None takes 64 random bits."""
    min_new_tokens: int = 0
    """The answer does not end by itself before so many tokens."""
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Ids that end the answer, besides the target's own."""
    keeps_stop: bool = False
    """Whether the stop string that ends the answer is part of it."""
    bad_words: tuple[str, ...] = ()
    """Texts whose usual tokens the answer never ends with."""
    shows_special: bool = False
    """Whether the text of special tokens is shown."""
    mode: Mode | None = None
    num_draft_tokens: int | None = None
    """0 is plain decoding."""
    prediction: str = ""
    """The client's own guess of the answer, which is drafted first."""
    num_log_probs: int | None = None
    """Number of most probable ids to return with each token; None returns no log-probabilities."""
    num_prompt_log_probs: int | None = None
    """The same for the tokens of the prompt, where they are scored before decoding; see Engine.score_prompt."""
    ignores_eos: bool = False
    """Whether it goes on behind ids that end a text, up to `max_new_tokens`."""
    has_receipt: bool = False
    """Whether a receipt is made of the answer, which needs the reproducible mode."""
    is_stored: bool = True
    """Whether it may be recorded for training."""
    tenant: str = "default"
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    traceparent: str | None = None
    """The caller's W3C trace context."""

    def is_choice_beside(self, other: "GenerationRequest") -> bool:
        """Return whether both are choices of one prompt, which differ by their seeds."""
        own, others = (replace(each, seed=None, request_id="", num_prompt_log_probs=None) for each in (self, other))
        return own == others

    def noise_seed(self) -> int:
        """Return the seed, as an unsigned one of 64 bits. Raises RequestError."""
        return secrets.randbits(64) if self.seed is None else unsigned_seed(self.seed)

    def max_new_tokens_after(self, num_prompt_tokens: int, target: Target) -> int:
        """Return how many tokens the answer may have, at least one. Behind a prompt that takes at most half of the
        target's first context it stays there, unless the client says how long it may be. Raises RequestError."""
        num_free = max(target.context_limit - num_prompt_tokens, 1)
        if self.max_new_tokens is None:
            is_short = 2 * num_prompt_tokens <= target.first_context
            return target.first_context - num_prompt_tokens if is_short else num_free
        require_integer("max_new_tokens", self.max_new_tokens, at_least=1)
        return min(self.max_new_tokens, num_free)


def choices(
    prompts: Sequence[Mapping[str, Any]],
    num_choices: int,
    *,
    seed: int | None,
    num_prompt_log_probs: int | None = None,
    **shared: Any,
) -> list[GenerationRequest]:
    """Return a request for each choice of each prompt, the choices of a prompt next to each other. Raises RequestError.

    With a seed each prompt's choices have the seeds that they have alone; without one all seeds differ.

    Args:
        prompts: the fields of a GenerationRequest that differ between prompts.
        num_prompt_log_probs: of each prompt's first choice; the others have the same prompt.
        shared: the fields that all of them have.
    """
    request_id, drawn = uuid.uuid4().hex, secrets.randbits(53) if seed is None else unsigned_seed(seed)
    own_ids = [f"{request_id}-{place}" if place else request_id for place in range(len(prompts))]
    return [
        GenerationRequest(
            **prompt,
            **shared,
            seed=choice_seed(drawn, place * num_choices + number if seed is None else number),
            request_id=answer_id(own_ids[place], number) if number else own_ids[place],
            num_prompt_log_probs=None if number else num_prompt_log_probs,
        )
        for place, prompt in enumerate(prompts)
        for number in range(num_choices)
    ]


@dataclass(frozen=True, slots=True)
class GenerationStream:
    """One text that is generated alone, a step for each item read."""

    snapshot: LoadedSnapshot
    seed: int
    num_prompt_tokens: int
    steps: Generator[Step, None, None]
    """Closing it ends the text early and frees the target's memory."""
