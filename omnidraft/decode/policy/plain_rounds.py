"""Rounds that draft nothing, so that a plain pass is measured: drafts are compared with it, and larger passes tell how
fast the machine is, but not what further rows cost."""

from collections import Counter

_MAX_DRAFTED = 32
"""Rounds with drafts in a row."""


class PlainRounds:
    """Counts rounds by load. Where prompts are read in nearly all of them, whose passes measure nothing, plain and
    drafted ones take turns at being measured."""

    def __init__(self) -> None:
        self._num_drafted = Counter[int]()
        """Rounds with drafts since the last plain one."""
        self._measured: set[int] = set()
        """The loads of which a pass with drafts was measured since."""

    def is_due(self, load: int) -> bool:
        """Return whether the next round that can be measured is a plain one."""
        return self._num_drafted[load] >= _MAX_DRAFTED and load in self._measured

    def add(self, load: int, *, is_drafted: bool, is_measured: bool) -> None:
        """Count a round; its pass was measured if no prompts were read in it."""
        if is_drafted:
            self._num_drafted[load] += 1
        if is_measured and is_drafted:
            self._measured.add(load)
        elif is_measured:
            self._num_drafted[load] = 0
            self._measured.discard(load)
