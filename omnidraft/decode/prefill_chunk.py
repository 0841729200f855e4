"""How many prompt ids a pass reads, so that running texts wait for it no longer than a limit."""

from collections.abc import Callable

MAX_PREFILL_S = 0.25
"""Seconds by which reading other prompts may lengthen the time between two tokens of a running text, and as many by
which scoring them may, and the drafter's reading of them. Lower means smoother streams, and a later first token for
the others; a quarter of a second is still read as a stream."""
_MIN_CHUNK = 8
"""Prompt ids that a round reads at least, so that a prompt is read in the end."""
_UNMEASURED_CHUNK = 16

PassSeconds = Callable[[int], float]
"""The seconds of a pass by its number of rows."""


def chunk_beside(
    num_running: int, max_rows: int, pass_s: PassSeconds | None, max_prefill_s: float = MAX_PREFILL_S
) -> int:
    """Return the number of prompt ids that a pass over so many running texts reads beside them."""
    free = max_rows - num_running
    if not num_running or free <= _MIN_CHUNK:
        return max(free, _MIN_CHUNK)
    if pass_s is None:
        return min(free, _UNMEASURED_CHUNK)
    longest_s = pass_s(num_running) + max_prefill_s
    return next((num for num in range(free, _MIN_CHUNK, -1) if pass_s(num_running + num) <= longest_s), _MIN_CHUNK)


def chunk_between(max_rows: int, pass_s: PassSeconds | None, max_prefill_s: float = MAX_PREFILL_S) -> int:
    """Return the number of prompt ids that a pass of their own reads between two passes over running texts: at least
    one, and as many as take no longer than one, as where all passes are padded to one size."""
    if pass_s is None:
        return min(max_rows, _UNMEASURED_CHUNK)
    longest_s = max(pass_s(1), max_prefill_s)
    return next(num for num in range(max_rows, 0, -1) if pass_s(num) <= longest_s)
