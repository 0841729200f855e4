"""A request in the queue of its engine, the steps that the decoding thread hands to its reader, and how it can end."""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.prompting import prompt_bytes
from omnidraft.decode.sequence import SequenceState
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.decode.teacher_forcing import PromptToken
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.ports import Request, Step

MAX_PROMPT_LOG_PROBS = 1 << 18
"""Log-probabilities of the prompts of one request, which take 100 MB until they are sent."""


@dataclass(slots=True)
class QueuedText:
    """One of the texts that a request asks for."""

    request: GenerationRequest
    stats: DecodeStats = field(default_factory=DecodeStats)
    decoded: Request | None = None
    """The request in ids; None until QueuedRequest.tokenize was called."""
    sequence: SequenceState | None = None
    """None until decoding begins."""
    prompt_tokens: list[PromptToken] = field(default_factory=list)
    """The prompt's tokens after the first, with their log-probabilities, where the request asks for them."""


class QueuedRequest:
    """The texts of one HTTP request; they are decoded side by side, with one snapshot."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        *,
        client: str = "default",
        cache_scope: str | None = None,
        priority: int = 0,
        note: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            client: the fair queue charges the decoding time to it.
            cache_scope: requests of one scope may reuse each other's keys; None reuses nothing.
            priority: requests of one client with a lower one are served before others.
            note: the decoding thread calls it before each result can be read; it must return at once, like `wake`.
            wake: the decoding thread calls it whenever there is something to read.
        """
        self.engine = engine
        self.texts = tuple(QueuedText(request) for request in requests)
        self.client = client
        self.cache_scope = cache_scope
        self.priority = priority
        self.is_abandoned = False
        """The client went away: decoding ends at its next step."""
        self._note, self._wake = note, wake
        self._results: queue.SimpleQueue[tuple[int, Step] | Exception | None] = queue.SimpleQueue()

    @property
    def request_id(self) -> str:
        return self.texts[0].request.request_id

    @property
    def scores_prompts(self) -> bool:
        """Whether prompts are scored before decoding."""
        return any(text.request.num_prompt_log_probs is not None for text in self.texts)

    @property
    def stats(self) -> DecodeStats:
        """The sums over all texts."""
        return sum((text.stats for text in self.texts[1:]), self.texts[0].stats)

    @property
    def num_prompt_bytes(self) -> int:
        """The bytes of all prompts, those of choices counted once."""
        requests = [text.request for text in self.texts]
        return sum({(each.prompt, each.suffix, id(each.messages)): prompt_bytes(each) for each in requests}.values())

    def tokenize(self) -> None:
        """Turn each text's request into ids, once; the choices of one prompt share what was done for the first of them.
        A long prompt takes seconds. Raises RequestError."""
        last: tuple[GenerationRequest, Request] | None = None
        num_told = 0
        for text in self.texts:
            if text.decoded is None and last is not None and text.request.is_choice_beside(last[0]):
                text.decoded = replace(last[1], seed=text.request.noise_seed())
            elif text.decoded is None:
                text.decoded = self.engine.decode_request(text.request)
            last = text.request, text.decoded
            if (num_likeliest := text.request.num_prompt_log_probs) is not None:
                num_told += len(text.decoded.prompt_ids) * (1 + num_likeliest)
            if num_told > MAX_PROMPT_LOG_PROBS:
                raise RequestError(
                    f"prompt_logprobs: more than {MAX_PROMPT_LOG_PROBS} for all prompts together; shorten them, "
                    "or ask for fewer"
                )

    def put(self, result: tuple[int, Step] | Exception | None) -> None:
        """Hand over the next step with the index of its text; an exception or None ends the request."""
        self._note()
        self._results.put(result)
        self._wake()

    def ready_steps(self) -> Iterator[tuple[int, Step] | None]:
        """Yield what can be read without blocking; None is the end. Raises what decoding raised."""
        while not self._results.empty():
            result = self._results.get_nowait()
            if isinstance(result, Exception):
                raise result
            yield result


class QueueFull(OmnidraftError):
    """Too many requests wait; try again after `retry_after_s` (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(OmnidraftError):
    """The worker is about to end; ask another one (HTTP 503)."""


class Abandoned(OmnidraftError):
    """The client went away; nobody reads the response."""


def end_status(error: Exception | None) -> str:
    """Return the label of the counter of requests."""
    match error:
        case None:
            return "ok"
        case Abandoned():
            return "abandoned"
        case _:
            return type(error).__name__
