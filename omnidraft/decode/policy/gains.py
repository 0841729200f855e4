"""What drafting gains for the texts of each stream under each load, and the trials of what does not pay.

A stream is a tenant's texts of one kind; a load is a power of two of texts that share rounds. A tenant begins with what
was measured over all. A draft source that does not pay for a stream ends, and is tried again now and then for a small
share of the seconds in which the texts went without it.

Some rounds draft nothing, so that a plain pass is measured: drafts are compared with it, and larger passes tell how
fast the machine is, but not what further rows cost.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from omnidraft.ports import RoundText, TextOutcome, Work

EMA_WEIGHT = 0.03
"""Weight of a new observation in a moving average."""
MIN_GAIN = -0.1
"""The lowest estimate of the tokens that the drafter gains per text and round, so that a few good trials bring it
back."""
_FIRST_ROUNDS = 10
"""Rounds that the prior gain counts for."""
_DECAY = 0.97
"""Decay per round of the sums of seconds: about 30 rounds count."""
TRIAL_SHARE = 0.01
"""Share of the time without drafting that trials may cost."""
_FIRST_SHARES = 4
"""Times this share that the first trial after a gain may cost, and the second half as many: it may have been costs that
were wrong, not drafts."""
TRIAL_ROUNDS = 4
MAX_STREAMS = 2048
"""Tenants, kinds and loads of requests with statistics of their own; the least recently seen one is dropped."""
_LEAST_DRAFTED, _MAX_DRAFTED = 4, 32
"""Rounds with drafts in a row: few at first, and then twice as many each time, since passes with drafts alone do not
tell a slow machine from dear rows."""
_FIRST_SEARCH_GAIN = 0.2
"""Tokens per text and round that a search of memory is expected to gain before any was measured."""
_MIN_SEARCHES = 10
"""Searches that are timed before any is left out."""
_CLOCK_WEIGHT = 0.1
"""Weight of a new search in the moving mean of their seconds; the first ones count alike."""
_MAX_RATIO = 10
"""Times the mean that a search counts as at most: what takes longer is a hiccup of the machine."""


@dataclass(frozen=True, slots=True)
class SpentText:
    """A text after a round, with its share of the round's seconds."""

    outcome: TextOutcome
    seconds: float
    seconds_without: float
    """What it would have taken without the drafter."""

    @property
    def num_without(self) -> int:
        """Tokens that the round would have given without the drafter."""
        return 1 + self.outcome.num_accepted_without if self.outcome.has_drafter else self.outcome.num_emitted

    def gain(self, token_s: float) -> float:
        """Return how many tokens the drafter added to those of the time that it took, at `token_s` for each of them."""
        return self.outcome.num_emitted - self.num_without - (self.seconds - self.seconds_without) / token_s


@dataclass(slots=True)
class DraftingStats:
    """The gain of the drafter for one tenant's texts, or for those of all, of one kind under one load."""

    gain: float
    emits: float = 2.0
    """Tokens per text and round with a drafter."""
    num_drafted: int = 0
    """Rounds with a drafter."""
    trials_left: int = 0
    num_trials: int = 0
    """Trials since it last gained."""
    idle_s: float = 0.0
    """Seconds without a drafter that no trial was taken from."""
    plain_s: float = 0.0
    """Seconds that recent rounds' tokens would have taken without drafting."""
    seconds: float = 0.0
    """Seconds that they took."""
    plain_without_s: float = 0.0
    """Seconds that the tokens that those rounds would have given without the drafter take in plain decoding."""
    seconds_without: float = 0.0
    """Seconds that they would have taken without the drafter."""

    @property
    def speedup_without(self) -> float:
        """Return how many times as fast as plain decoding the other draft sources are, and at least 1."""
        return max(self.plain_without_s / self.seconds_without, 1.0) if self.seconds_without else 1.0

    def add(self, texts: Sequence[SpentText], token_s: float) -> None:
        """Add these texts of a round; a token of plain decoding takes `token_s`."""
        drafted = [each for each in texts if each.outcome.has_drafter]
        self.plain_without_s = self.plain_without_s * _DECAY + token_s * sum(each.num_without for each in texts)
        self.seconds_without = self.seconds_without * _DECAY + sum(each.seconds_without for each in texts)
        if drafted:
            emits = sum(each.outcome.num_emitted for each in drafted) / len(drafted)
            earned = sum(each.gain(token_s / self.speedup_without) for each in drafted)
            self.add_gain(emits, earned / len(drafted))
        self.plain_s = self.plain_s * _DECAY + token_s * sum(each.outcome.num_emitted for each in texts)
        self.seconds = self.seconds * _DECAY + sum(each.seconds for each in texts)

    def add_idle(self, texts: Sequence[SpentText]) -> None:
        """Add the seconds of those of these texts that had no drafter, which trials are taken from."""
        self.idle_s += sum(each.seconds for each in texts if not each.outcome.has_drafter)

    def add_gain(self, emits: float, earned: float) -> None:
        """Add a round with a drafter: tokens per text, and how many of them it earned."""
        weight = max(EMA_WEIGHT, 1 / (_FIRST_ROUNDS + self.num_drafted))
        self.num_drafted += 1
        self.trials_left = max(self.trials_left - 1, 0)
        self.gain = max(self.gain + weight * (earned - self.gain), MIN_GAIN)
        self.emits += weight * (emits - self.emits)
        if self.gain > 0:
            self.num_trials = 0


@dataclass(slots=True)
class AnswerLength:
    """The moving average of the tokens of one tenant's answers, or of all, of one kind."""

    mean: float = 128.0

    def add(self, num_tokens: int) -> None:
        """Add the tokens of an answer that ended."""
        self.mean += EMA_WEIGHT * (num_tokens - self.mean)


def load_of(num_texts: int) -> int:
    """Return the nearest power of two, so that a text that ends changes no load of 2, 4, 8 or 16 texts."""
    return round(math.log2(num_texts))


def stream_of(text: RoundText | TextOutcome) -> tuple[str, Work]:
    """Return what the text's gains are counted for: its tenant and its kind."""
    return text.tenant, text.work


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
        share = TRIAL_SHARE * max(_FIRST_SHARES >> stats.num_trials, 1)
        if not stats.trials_left and trial_s < share * payer.idle_s:
            stats.trials_left, payer.idle_s = TRIAL_ROUNDS, 0.0
            stats.num_trials += 1
        return stats.trials_left > 0

    def _new(self, tenant: str | None, work: Work, load: int) -> DraftingStats:
        of_all = None if tenant is None else self._stats(None, work, load)
        if of_all is None or not of_all.num_drafted:
            return DraftingStats(self._first_gain(2**load))
        return DraftingStats(of_all.gain, of_all.emits)


class PlainRounds:
    """Counts rounds by load. Where prompts are read in nearly all of them, whose passes measure nothing, plain and
    drafted ones take turns at being measured."""

    def __init__(self) -> None:
        self._num_drafted = Counter[int]()
        """Rounds with drafts since the last plain one."""
        self._most = defaultdict[int, int](lambda: _LEAST_DRAFTED)
        self._measured: set[int] = set()
        """The loads of which a pass with drafts was measured since."""

    def is_due(self, load: int) -> bool:
        """Return whether the next round that can be measured is a plain one."""
        return self._num_drafted[load] >= self._most[load] and load in self._measured

    def add(self, load: int, *, is_drafted: bool, is_measured: bool) -> None:
        """Count a round; its pass was measured if no prompts were read in it."""
        if is_drafted:
            self._num_drafted[load] += 1
        if is_measured and is_drafted:
            self._measured.add(load)
        elif is_measured:
            if load in self._measured:
                self._most[load] = min(2 * self._most[load], _MAX_DRAFTED)
            self._num_drafted[load] = 0
            self._measured.discard(load)


class SearchGains:
    """Decides for which texts the suffix memory is searched. A search takes as long beside a fast target as beside a
    slow one: where that is more of a plain token's seconds than trials may cost, the tokens of memory have to be worth
    the search and their rows."""

    def __init__(self, pass_s: Callable[[int], float]) -> None:
        """Take the seconds of a pass by its rows."""
        self._pass_s = pass_s
        self._search_s = 0.0
        """The moving mean of the seconds of a search for one text; 0 before any is measured."""
        self._num_searches = 0
        self.streams = StreamStats(lambda num_texts: _FIRST_SEARCH_GAIN)

    def should_search(self, index: int, texts: Sequence[RoundText], num_texts: int) -> bool:
        """Return whether memory is searched for one of a round's texts, of which `num_texts` share the target; begin a
        trial where one is due."""
        stream = stream_of(texts[index])
        is_cheap = self._search_s <= TRIAL_SHARE * self._token_s(num_texts)
        if self.streams.of(*stream, num_texts).gain > 0 or is_cheap or self._num_searches < _MIN_SEARCHES:
            return True
        trial_s = TRIAL_ROUNDS * self._search_s * sum(stream_of(text) == stream for text in texts)
        return self.streams.try_again(*stream, num_texts, trial_s)

    def update(self, outcomes: Sequence[TextOutcome], num_texts: int, node_s: float) -> None:
        """Account for the texts of a round, of which `num_texts` shared the target and a drafted row took `node_s`."""
        for each in outcomes:
            if each.search_s:
                self._follow(each.search_s)
        for stream in dict.fromkeys(stream_of(outcome) for outcome in outcomes):
            own = [each for each in outcomes if stream_of(each) == stream]
            num_idle = sum(not each.search_s for each in own)
            self.streams.payer(*stream, num_texts).idle_s += num_idle * self._token_s(num_texts)
            self._add(self.streams.of(*stream, num_texts), own, node_s, num_texts)
        for work in dict.fromkeys(outcome.work for outcome in outcomes):
            of_work = [each for each in outcomes if each.work == work]
            self._add(self.streams.of(None, work, num_texts), of_work, node_s, num_texts)

    def _add(self, stats: DraftingStats, outcomes: Sequence[TextOutcome], node_s: float, num_texts: int) -> None:
        searched = [each for each in outcomes if each.search_s]
        if not searched:
            return
        spent_s = node_s * sum(each.num_remembered for each in searched) + self._search_s * len(searched)
        earned = sum(each.num_accepted_remembered for each in searched) - spent_s / self._token_s(num_texts)
        emits = sum(each.num_emitted for each in searched) / len(searched)
        stats.add_gain(emits, earned / len(searched))

    def _follow(self, seconds: float) -> None:
        """Add the seconds of one search, unless it is the first of the process, which takes longer."""
        num_before, self._num_searches = self._num_searches, self._num_searches + 1
        if self._search_s:
            seconds = min(seconds, _MAX_RATIO * self._search_s)
        if num_before:
            self._search_s += max(_CLOCK_WEIGHT, 1 / num_before) * (seconds - self._search_s)

    def _token_s(self, num_texts: int) -> float:
        """Return the seconds per token of plain decoding."""
        return self._pass_s(num_texts) / num_texts
