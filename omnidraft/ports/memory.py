"""The fleet's memory: why tokens leave it, and why a file of it serves nobody; values of the metric label `reason`."""

from typing import Literal, get_args

MemoryDropReason = Literal["expired", "forgotten", "full", "unknown_ids"]
"""Older than the log's retention; of a forgotten tenant; the oldest beyond a limit; with ids that the target lacks."""
UnreadableReason = Literal["forgotten", "unknown_key", "damaged"]
"""The key of a memory's file is destroyed, or is not known here; or the content is not that of a memory."""

MEMORY_DROP_REASONS: tuple[str, ...] = get_args(MemoryDropReason)
UNREADABLE_REASONS: tuple[str, ...] = get_args(UnreadableReason)
