"""One prompt decoded by one method: what came out and what it cost, or why nothing did."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Step

if TYPE_CHECKING:
    from omnidraft.models.hf.generate import Generated

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
"""What decoders, other people's among them, raise on a prompt that they cannot take."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """An answer."""

    ids: tuple[int, ...]
    figures: DecodeStats
    draft_s: float | None = None
    """In the passes that `figures.decode_s` covers; None where the method does not tell."""
    target_s: float | None = None

    @property
    def overhead_s(self) -> float | None:
        """All of the decoding that was neither drafter nor target, what lies outside the loop included."""
        if self.draft_s is None or self.target_s is None:
            return None
        return max(self.figures.decode_s - self.draft_s - self.target_s, 0.0)

    def plain_data(self) -> dict[str, Any]:
        """For the report."""
        later = {"later_draft_s": self.draft_s, "later_target_s": self.target_s}
        return self.figures.summary() | later | {"ids": list(self.ids)}


@dataclass(frozen=True, slots=True)
class Failure:
    """The method crashed."""

    reason: str

    def plain_data(self) -> dict[str, Any]:
        """For the report."""
        return {"failure": self.reason}


Outcome = BenchRun | Failure
Method = Callable[[str, int], BenchRun]
"""(prompt, tokens at most) -> the answer."""


def attempt(method: Method, text: str, max_new_tokens: int) -> Outcome:
    """The answer, or the first line of why there is none."""
    try:
        return method(text, max_new_tokens)
    except CRASHES as exc:
        return Failure(f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0][:300]}")


def watched(steps: Iterable[Step]) -> BenchRun:
    """Take the steps of our own engine as they come."""
    figures, taken = DecodeStats(), []
    for step in steps:
        figures.take(step)
        taken.append(step)
    later = [step.timings for step in taken[1:]]
    return BenchRun(
        tuple(token for step in taken for token in step.emitted),
        figures,
        draft_s=sum(timings.draft_s for timings in later),
        target_s=sum(timings.target_s for timings in later),
    )


def run_of(generated: "Generated") -> BenchRun:
    """What transformers' generate tells: tokens, passes and times."""
    figures = DecodeStats(
        num_tokens=len(generated.ids),
        num_passes=generated.num_passes,
        num_later_tokens=generated.num_later_tokens,
        first_token_s=generated.first_token_s,
        decode_s=generated.decode_s,
    )
    return BenchRun(generated.ids, figures)


def rotated(names: list[str], by: int) -> list[str]:
    """The same names, another one first."""
    start = by % len(names)
    return names[start:] + names[:start]
