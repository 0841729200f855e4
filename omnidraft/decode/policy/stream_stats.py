"""The gains of every stream of texts under every load, and the trials of those that a draft source does not pay for.

A stream is a tenant's texts of one kind; a load is a power of two of texts that share rounds. A tenant begins with what
was measured over all, and pays for trials with the seconds in which its texts went without the draft source.

Some rounds draft nothing, so that a plain pass is measured: drafts are compared with it, and larger passes tell how
fast the machine is, but not what further rows cost.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from omnidraft.decode.policy.drafting_stats import DraftingStats, load_of
from omnidraft.ports import Work

TRIAL_SHARE = 0.02
"""Share of the time without drafting that trials may cost."""
TRIAL_ROUNDS = 4
MAX_STREAMS = 2048
"""Tenants, kinds and loads of requests with statistics of their own; the least recently seen one is dropped."""


class StreamStats:
    """The gains of one draft source for each stream under each load."""

    def __init__(self, first_gain: Callable[[int], float]) -> None:
        """
        Args:
            first_gain: the tokens per text and round that are expected before any was measured, by the number of texts.
        """
        self._first_gain = first_gain
        self._stats: Callable[[str | None, Work, int], DraftingStats] = lru_cache(MAX_STREAMS)(self._new)

    def of(self, tenant: str | None, work: Work = "text", num_texts: int = 1) -> DraftingStats:
        """Return the gain for this tenant's texts of this kind, None: for those of all, in rounds of about so many."""
        return self._stats(tenant, work, load_of(num_texts))

    def payer(self, tenant: str, work: Work = "text", num_texts: int = 1) -> DraftingStats:
        """Return whose idle seconds a trial is taken from. Tenants that were never drafted for pay together: each may
        have too few of them."""
        stats = self.of(tenant, work, num_texts)
        return stats if stats.num_drafted else self.of(None, work, num_texts)

    def try_again(self, tenant: str, work: Work, num_texts: int, trial_s: float) -> bool:
        """Return whether a trial of this stream goes on; begin one where the seconds that it takes are saved up."""
        stats, payer = self.of(tenant, work, num_texts), self.payer(tenant, work, num_texts)
        if not stats.trials_left and trial_s < TRIAL_SHARE * payer.idle_s:
            stats.trials_left, payer.idle_s = TRIAL_ROUNDS, 0.0
        return stats.trials_left > 0

    def _new(self, tenant: str | None, work: Work, load: int) -> DraftingStats:
        of_all = None if tenant is None else self._stats(None, work, load)
        if of_all is None or not of_all.num_drafted:
            return DraftingStats(self._first_gain(2**load))
        return DraftingStats(of_all.gain, of_all.emits)


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
