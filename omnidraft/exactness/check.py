"""The exactness check of one engine: text comparison and sampling test at each temperature and mode. The report is
plain data, which `--json` writes and the table and the verdict are made of."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any, get_args

from omnidraft.decode.engine import Engine, Pair
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.exactness.compare import Difference, TextComparer, TextComparison, Verdict
from omnidraft.exactness.distribution_test import SamplingTest
from omnidraft.exactness.rounding import Rounding, measure
from omnidraft.ports import Mode, Request, Sampling

NUM_ROUNDING_PROMPTS = 3
"""Number of prompts over whose answers the rounding is measured, at most."""
NUM_ROUNDING_TOKENS = 48
"""Number of tokens of each of these answers, at most."""
NUM_SAMPLING_PROMPTS = 8
"""Number of prompts among which the sampling test chooses one, at most."""
_CONTEXT_BYTES = 60


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

    def num_progress_steps(self, temperatures: Sequence[float], modes: Sequence[Mode]) -> int:
        """Return the number of calls of `on_progress` that checking these will make."""
        measured = len(self.prompts[:NUM_ROUNDING_PROMPTS]) if "fast" in modes else 0
        return measured + len(temperatures) * len(modes) * (len(self.prompts) + self.num_samples)


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

    def report(self, temperatures: Sequence[float], modes: Sequence[Mode]) -> dict[str, Any]:
        """Check every mode at every temperature; return totals, the worst distribution test, and a row for each run."""
        runs = [self.run(temperature, mode) for mode in modes for temperature in temperatures]
        engine, plan = self._engine, self._plan
        return {
            "passed": all(run["passed"] for run in runs),
            "target": engine.pair.target,
            "drafter": engine.pair.drafter,
            "snapshot": engine.slot.current.snapshot_id,
            "fingerprint": engine.decoder.target.fingerprint,
            "seed": plan.seed,
            "max_new_tokens": plan.max_new_tokens,
            "concurrency": plan.concurrency,
            **{name: sum(run[name] for run in runs) for name in ("texts", *get_args(Verdict))},
            "law": _worst([run["law"] for run in runs]),
            "runs": runs,
        }

    def run(self, temperature: float, mode: Mode) -> dict[str, Any]:
        """Run the check at one temperature in one mode; return its row of the report.

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
        comparisons: list[TextComparison] = []
        for index, request in enumerate(requests):
            comparisons.append(comparer.compare(request, self._companions(requests, index)))
            self._on_progress()
        chosen = self._sampling_test.highest_entropy(requests[:NUM_SAMPLING_PROMPTS])
        tests = self._sampling_test.run(chosen, self._plan.num_samples, rounding=limit, on_progress=self._on_progress)
        laws = [asdict(test) | {"passed": test.passed} for test in tests]
        verdicts = [each.verdict for each in comparisons]
        stats = sum((each.stats for each in comparisons), DecodeStats())
        return {
            "passed": all(test.passed for test in tests) and "unexplained" not in verdicts,
            "temperature": temperature,
            "mode": mode,
            "texts": len(verdicts),
            **{name: verdicts.count(name) for name in get_args(Verdict)},
            "tokens": sum(len(each.answer) for each in comparisons),
            "scored": stats.num_scored,
            "agreement": stats.agreement,
            "tokens_per_pass": round(stats.tokens_per_pass, 4),
            "accepted_by_source": dict(stats.accepted_by_source),
            "rounding": asdict(rounding) | {"limit": rounding.limit} if rounding else None,
            "law": _worst(laws),
            "law_positions": laws,
            "law_prompt": self._plan.prompts[requests.index(chosen)],
            "differences": [
                _difference(difference, comparison, prompt, pair)
                for prompt, comparison in zip(self._plan.prompts, comparisons, strict=True)
                for difference in comparison.differences
            ],
        }

    def _companions(self, requests: Sequence[Request], index: int) -> list[Request]:
        """Return the requests that are decoded beside this one: the next prompts, with seeds of their own."""
        others = [requests[(index + number) % len(requests)] for number in range(1, self._plan.concurrency)]
        return [replace(each, seed=each.seed + number) for number, each in enumerate(others, 1)]

    @cached_property
    def rounding(self) -> Rounding:
        """The rounding between fast passes, measured once."""
        measured = []
        for prompt in self._plan.prompts[:NUM_ROUNDING_PROMPTS]:
            request = self._request(prompt, 1.0, "fast")
            short = replace(request, max_new_tokens=min(request.max_new_tokens, NUM_ROUNDING_TOKENS))
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


def _worst(laws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the test that failed, or came nearest to its limit."""
    return max(laws, key=lambda law: (not law["passed"], law["tv"] - law["tv_limit"]))


def _difference(difference: Difference, comparison: TextComparison, prompt: str, pair: Pair) -> dict[str, Any]:
    """Return one difference and its surroundings, in ids and in text."""
    vocabulary = pair.target_tokenizer.vocabulary

    def text_of(token: int | None) -> str | None:
        return None if token is None else vocabulary.spell([token]).decode(errors="backslashreplace")

    index = difference.index
    before = vocabulary.spell(comparison.answer[:index])[-_CONTEXT_BYTES:]
    after = vocabulary.spell(comparison.answer[index + 1 :])[:_CONTEXT_BYTES]
    return {
        "prompt": prompt,
        "position": index,
        "is_explained": difference.problem is None,
        "problem": difference.problem,
        "logit_difference": difference.logit_difference,
        "plain_token": difference.plain_token,
        "plain_text": text_of(difference.plain_token),
        "drafted_token": difference.drafted_token,
        "drafted_text": text_of(difference.drafted_token),
        "before": before.decode(errors="backslashreplace"),
        "after": after.decode(errors="backslashreplace"),
    }
