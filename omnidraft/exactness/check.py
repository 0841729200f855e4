"""The exactness check of one engine: text comparison and sampling test at each temperature and mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.exactness.compare import TextComparer, TextComparison
from omnidraft.exactness.distribution_test import DistributionTest, SamplingTest
from omnidraft.exactness.rounding import Rounding, measure
from omnidraft.ports import Mode, Request, Sampling


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The prompts and sample sizes of a check."""

    prompts: Sequence[str]
    max_new_tokens: int = 64
    num_draft_tokens: int | None = None
    """None: the deployment's setting."""
    seed: int = 0
    num_samples: int = 1000
    """Samples of the sampling test."""
    concurrency: int = 1
    """Number of texts that are decoded together while one of them is compared."""
    num_rounding_prompts: int = 3
    """Number of prompts over whose answers the rounding is measured, at most."""
    num_rounding_tokens: int = 48
    """Number of tokens of each of these answers, at most."""
    num_sampling_prompts: int = 8
    """Number of prompts among which the sampling test chooses one, at most."""

    def num_progress_steps(self, temperatures: Sequence[float], modes: Sequence[Mode]) -> int:
        """Return the number of calls of `on_progress` that checking these will make."""
        measured = len(self.prompts[: self.num_rounding_prompts]) if "fast" in modes else 0
        return measured + len(temperatures) * len(modes) * (len(self.prompts) + self.num_samples)


@dataclass(frozen=True, slots=True)
class CheckRun:
    """The results at one temperature in one mode."""

    temperature: float
    mode: Mode
    comparisons: tuple[TextComparison, ...]
    """One per prompt."""
    distribution_tests: tuple[DistributionTest, ...]
    sampled_prompt: int
    """Index of the prompt of the sampling test."""
    rounding: Rounding | None
    """None in reproducible mode, which allows none."""

    @property
    def passed(self) -> bool:
        return all(test.passed for test in self.distribution_tests) and all(
            each.verdict != "unexplained" for each in self.comparisons
        )


class ExactnessCheck:
    """Checks the target and drafter of one engine."""

    def __init__(self, engine: Engine, plan: CheckPlan, on_progress: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            on_progress: called after each text, each sample and each measured answer.
        """
        self._engine = engine
        self._plan = plan
        self._on_progress = on_progress
        self._proposer = engine.slot.current.proposer
        self._sampling_test = SamplingTest(engine.decoder, self._proposer)

    def run(self, temperature: float, mode: Mode) -> CheckRun:
        """Run the check at one temperature in one mode.

        Raises:
            RequestError, ConfigError: the engine cannot decode this, or not in this mode.
        """
        rounding = self.rounding if mode == "fast" else None
        limit = rounding.limit if rounding else 0.0
        requests = [self._request(prompt, temperature, mode) for prompt in self._plan.prompts]
        pair = self._engine.pair
        comparer = TextComparer(
            self._engine.decoder,
            self._proposer,
            pair.target_tokenizer.vocabulary,
            pair.drafter_tokenizer,
            rounding=limit,
        )
        comparisons = []
        for index, request in enumerate(requests):
            comparisons.append(comparer.compare(request, self._companions(requests, index)))
            self._on_progress()
        chosen = self._sampling_test.highest_entropy(requests[: self._plan.num_sampling_prompts])
        tests = self._sampling_test.run(chosen, self._plan.num_samples, rounding=limit, on_progress=self._on_progress)
        return CheckRun(temperature, mode, tuple(comparisons), tuple(tests), requests.index(chosen), rounding)

    def _companions(self, requests: Sequence[Request], index: int) -> list[Request]:
        """Return the requests that are decoded beside this one: the next prompts, with seeds of their own."""
        others = [requests[(index + number) % len(requests)] for number in range(1, self._plan.concurrency)]
        return [replace(each, seed=each.seed + number) for number, each in enumerate(others, 1)]

    @cached_property
    def rounding(self) -> Rounding:
        """The rounding between fast passes, measured once."""
        measured = []
        for prompt in self._plan.prompts[: self._plan.num_rounding_prompts]:
            request = self._request(prompt, 1.0, "fast")
            short = replace(request, max_new_tokens=min(request.max_new_tokens, self._plan.num_rounding_tokens))
            measured.append(measure(self._engine.decoder, short))
            self._on_progress()
        return reduce(add, measured)

    def _request(self, prompt: str, temperature: float, mode: Mode) -> Request:
        """Return the request for a prompt, as a chat message where both models have a chat template."""
        pair, plan = self._engine.pair, self._plan
        is_chat = all(each.has_chat_template for each in (pair.target_tokenizer, pair.drafter_tokenizer) if each)
        return self._engine.decode_request(
            GenerationRequest(
                prompt=None if is_chat else prompt,
                messages=[{"role": "user", "content": prompt}] if is_chat else None,
                max_new_tokens=plan.max_new_tokens,
                sampling=Sampling(temperature),
                seed=plan.seed,
                mode=mode,
                num_draft_tokens=plan.num_draft_tokens,
            )
        )
