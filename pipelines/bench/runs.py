"""One prompt decoded by one method: its tokens and their cost, or the reason of a failure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Step
from omnidraft.prompts import Prompt

if TYPE_CHECKING:
    from omnidraft.models.hf.generate import Generated

WARM_UP_TEXT = "Name the days of the week, then the months of the year."
"""Answered before anything is measured. It is no prompt that is, whose answer some methods would remember."""
WARM_UP_TOKENS = 16
CRASHES = (
    OmnidraftError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The exceptions that decoders, including other libraries', raise on a prompt that they cannot take."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """An answer with its cost."""

    ids: tuple[int, ...]
    stats: DecodeStats
    draft_s: float | None = None
    """Seconds in the passes that `stats.decode_s` covers; None where the method does not measure it."""
    target_s: float | None = None

    @property
    def overhead_s(self) -> float | None:
        """Seconds of decoding in neither drafter nor target, including time outside the loop."""
        if self.draft_s is None or self.target_s is None:
            return None
        return max(self.stats.decode_s - self.draft_s - self.target_s, 0.0)

    def plain_data(self) -> dict[str, Any]:
        """Return the fields of the report."""
        later = {"later_draft_s": self.draft_s, "later_target_s": self.target_s}
        return self.stats.summary() | later | {"ids": list(self.ids)}


@dataclass(frozen=True, slots=True)
class Failure:
    """The method crashed."""

    reason: str

    def plain_data(self) -> dict[str, Any]:
        """Return the fields of the report."""
        return {"failure": self.reason}


Outcome = BenchRun | Failure
Method = Callable[[Prompt, int], BenchRun]
"""(prompt, tokens at most) -> the answer."""


def attempt(method: Method, prompt: Prompt, max_new_tokens: int) -> Outcome:
    """Return the answer, or a failure with the first line of its reason."""
    try:
        return method(prompt, max_new_tokens)
    except CRASHES as exc:
        return Failure(f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0][:300]}")


def run_of_steps(steps: Iterable[Step]) -> BenchRun:
    """Run our own engine's steps to their end and return the run."""
    stats, taken = DecodeStats(), []
    for step in steps:
        stats.take(step)
        taken.append(step)
    later = [step.timings for step in taken[1:]]
    return BenchRun(
        tuple(token for step in taken for token in step.emitted),
        stats,
        draft_s=sum(timings.draft_s for timings in later),
        target_s=sum(timings.target_s for timings in later),
    )


def run_of_generate(generated: "Generated") -> BenchRun:
    """Return the run of a transformers generate call."""
    stats = DecodeStats(
        num_tokens=len(generated.ids),
        num_passes=generated.num_passes,
        num_later_tokens=generated.num_later_tokens,
        first_token_s=generated.first_token_s,
        decode_s=generated.decode_s,
    )
    return BenchRun(generated.ids, stats)


def rotated(names: list[str], by: int) -> list[str]:
    """Return the same names, rotated by `by`."""
    start = by % len(names)
    return names[start:] + names[:start]
