"""Where a distiller stands, for whoever asks from another thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Status:
    """Replaced whole, so any thread may read it."""

    version: int | None = None
    """Newest snapshot published."""
    is_paused: bool = False
    waits_for: str | None = None
    """What an operator has to decide before learning goes on; None: nothing."""
    num_steps: int = 0
    num_records: int = 0
    num_tokens: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    """Of the last step."""
    tokens_per_s: float | None = None
    """Emitted target tokens of the last step, by its duration."""
    agreement: float | None = None
    """Of the newest snapshot, on held-out records."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
