"""Prompts decoded by methods in turn: the tokens of each and their cost, or the reason of a failure."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft import prompts
from omnidraft.cli.choices import named_files
from omnidraft.config import Settings
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.demo.recorded import QUESTIONS
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Step
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from pipelines.lib import machine

if TYPE_CHECKING:
    from omnidraft.models.hf.generate import Generated

WARM_UP_TEXT = "Name the days of the week, then the months of the year."
"""Answered before anything is measured. It is no prompt that is, whose answer some methods would remember."""
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
Outcomes = dict[str, dict[str, list[Outcome]]]
"""Task -> method -> its outcomes, prompt by prompt."""
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


def tasks_of(paths: Sequence[Path] | None, num_prompts: int) -> dict[str, list[Prompt]]:
    """Return prompts of each file, of its split test, by the file's name; without files those of the demo."""
    if not paths:
        print(f"no --prompts: using {QUESTIONS}", file=sys.stderr)
    files = named_files(paths or [QUESTIONS])
    return {task: prompts.read(path, num_prompts, split="test") for task, path in files.items()}


def about(module: str, settings: Settings, tasks: Mapping[str, Sequence[Prompt]], **options: Any) -> dict[str, Any]:
    """Return the fields of the report that say what is measured, and where."""
    num_prompts = {task: len(rows) for task, rows in tasks.items()}
    return {
        "machine": machine.describe(),
        "options": {"command": machine.command(module), **options, "num_prompts": num_prompts},
        "settings": settings.model_dump(mode="json"),
    }


def measure(
    tasks: Mapping[str, Sequence[Prompt]],
    methods: Mapping[str, Method | Failure],
    max_new_tokens: int,
    outcomes: Outcomes,
    publish: Callable[[], object],
    *,
    warm_up_tokens: int = 16,
) -> None:
    """Run every method on every prompt; the order rotates from prompt to prompt.

    Args:
        outcomes: gets the outcomes of each method, by task.
        publish: called after each prompt.
    """
    for rows in tasks.values():
        for method in methods.values():
            _outcome(method, replace(rows[0], text=WARM_UP_TEXT), min(warm_up_tokens, max_new_tokens))
    for task, rows in tasks.items():
        with bar(f"{task}: prompts", len(rows)) as advance:
            for number, prompt in enumerate(rows):
                for name in rotated(list(methods), number):
                    of_method = outcomes.setdefault(task, {}).setdefault(name, [])
                    of_method.append(_outcome(methods[name], prompt, max_new_tokens))
                publish()
                advance()


def _outcome(method: Method | Failure, prompt: Prompt, max_new_tokens: int) -> Outcome:
    return method if isinstance(method, Failure) else attempt(method, prompt, max_new_tokens)


def plain_rows(outcomes: Outcomes, **more: str) -> list[dict[str, Any]]:
    """Return the report's row of each run."""
    return [
        {"task": task, "method": name, **more, "prompt": number} | outcome.plain_data()
        for task, of_task in outcomes.items()
        for name, of_method in of_task.items()
        for number, outcome in enumerate(of_method)
    ]


def rotated(names: list[str], by: int) -> list[str]:
    """Return the same names, rotated by `by`."""
    start = by % len(names)
    return names[start:] + names[:start]
