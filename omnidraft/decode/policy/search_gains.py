"""What the search of the suffix memory gains for the texts of one tenant, or of all, of one kind and load.

A search takes as long beside a fast target as beside a slow one. Where that is more of a plain token's seconds than
trials may cost, the tokens of memory have to be worth the search and their rows: else it ends, and is tried again now
and then for a small share of the time, so that texts that begin to repeat themselves are seen.
"""

from collections.abc import Callable, Sequence

from omnidraft.decode.policy.drafting_stats import DraftingStats, stream_of
from omnidraft.decode.policy.stream_stats import TRIAL_ROUNDS, TRIAL_SHARE, StreamStats
from omnidraft.ports import RoundText, TextOutcome

_FIRST_GAIN = 0.2
"""Tokens per text and round that are expected before any was measured."""
_MIN_SEARCHES = 10
"""Searches that are timed before any is left out."""
_CLOCK_WEIGHT = 0.1
"""Weight of a new search in the moving mean of their seconds; the first ones count alike."""
_MAX_RATIO = 10
"""Times the mean that a search counts as at most: what takes longer is a hiccup of the machine."""


class SearchGains:
    """Decides for which texts memory is searched. A tenant begins with what was measured over all."""

    def __init__(self, pass_s: Callable[[int], float]) -> None:
        """Take the seconds of a pass by its rows."""
        self._pass_s = pass_s
        self._search_s = 0.0
        """The moving mean of the seconds of a search for one text; 0 before any is measured."""
        self._num_searches = 0
        self.streams = StreamStats(lambda num_texts: _FIRST_GAIN)

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
