"""The plan of a soak, which every part gets, and the result that each gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnidraft.system import usable_processors


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The sizes of one soak; `python -m tests.soak --help` says what they mean."""

    out: Path
    seed: int = 0
    minutes: float = 30.0
    pace_s: float = 5.0
    fuzzed: int = 1_000_000
    outage_s: float = 60.0
    hold_s: float = 30.0
    target: str = "qwen2.5-coder-0.5b"
    drafter: str = "smollm2-135m"
    data: Path = Path("../shared/data")
    tasks: tuple[str, ...] = ("gsm8k", "code")
    phase_requests: int = 50
    threads: int = field(default_factory=usable_processors)


@dataclass(frozen=True, slots=True)
class PartResult:
    """The figures and assertions of one part."""

    figures: dict[str, Any]
    assertions: dict[str, bool]
    """A sentence that people may rely on -> whether it held."""


Part = Callable[[SoakPlan], PartResult]
