"""The settings of one request of the Python API, with vLLM's names and meanings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from omnidraft.decode.generation import GenerationRequest, choices
from omnidraft.errors import RequestError
from omnidraft.params import MAX_COUNT, SamplingNumbers, given_grammar, require_integer, sampling_of
from omnidraft.ports import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """Settings of one request, with vLLM's names and meanings; params.py says what its numbers are.

    A `top_k` of 0 or -1 draws from all tokens, as None does.
    """

    temperature: float = 1.0
    max_tokens: int | None = None
    """A ceiling. None goes on until the target ends the text or its context is full."""
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    """Added to the logits of these ids."""
    seed: int | None = None
    """The same seed gives the same text, whatever drafts and whatever is generated beside it. None draws one."""
    n: int = 1
    """The number of texts, which share the keys of the prompt; the first is the text that n = 1 gives."""
    stop: str | Sequence[str] | None = ()
    logprobs: int | None = None
    """The number of most probable tokens reported with each token; -1 reports the whole vocabulary, some 10 MB a token
    for 100,000 entries, and None no log-probabilities."""
    json_schema: str | Mapping[str, Any] | None = None
    """The text is JSON that this schema allows."""
    regex: str | None = None
    """The whole text matches this pattern."""
    prediction: str = ""
    """What the text will probably be, such as a file before an edit: it is drafted first, and changes no text."""
    num_draft_tokens: int | None = None
    """The maximal number of tokens drafted per pass: 0 decodes plainly; None takes the deployment's setting."""
    mode: Mode | None = None
    """`fast` or `reproducible`; None takes the deployment's setting."""
    store: bool = True
    """False: nothing of this request is learned, and no later text drafts from it."""

    def requests(self, prompt: Mapping[str, Any]) -> list[GenerationRequest]:
        """Return a request for each of the `n` texts. Raises RequestError."""
        self._check()
        grammar = given_grammar(self.json_schema, self.regex)
        return choices(
            [prompt],
            self.n,
            seed=self.seed,
            max_new_tokens=self.max_tokens,
            sampling=sampling_of(self, logit_bias=self.logit_bias, grammar=grammar),
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            mode=self.mode,
            prediction=self.prediction,
            num_draft_tokens=self.num_draft_tokens,
            num_log_probs=MAX_COUNT if self.logprobs == -1 else self.logprobs,
            is_stored=self.store,
        )

    def _check(self) -> None:
        """Raise RequestError for the first count that is no integer in its range, and for an unknown mode."""
        require_integer("n", self.n, at_least=1)
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, at_least=1)
        if self.logprobs is not None:
            require_integer("logprobs", self.logprobs, at_least=-1)
        if self.mode not in (None, *get_args(Mode)):
            raise RequestError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode}")
