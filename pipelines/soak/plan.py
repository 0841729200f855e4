"""The plan of a soak, which every part gets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from omnidraft.container_limits import usable_processors
from pipelines.lib.check_result import CheckResult


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The sizes of one soak."""

    out: Path
    seed: int = 0
    kills: int = 100
    pace_s: float = 5.0
    """Seconds until the next kill, on average."""
    fuzzed: int = 1_000_000
    outage_s: float = 60.0
    hold_s: float = 30.0
    """The duration for which a rate has to be held."""
    target: str = "qwen2.5-coder-0.5b"
    """The target of broker-down and drift; `tiny` is a random model. The drafter likewise."""
    drafter: str = "smollm2-135m"
    data: Path = Path("../shared/data")
    """Prompt files of the part in which traffic changes."""
    tasks: tuple[str, str] = ("gsm8k", "code")
    """Stems of two files there: traffic before the change and after it."""
    phase_requests: int = 50
    threads: int = field(default_factory=usable_processors)


Part = Callable[[SoakPlan], CheckResult]
