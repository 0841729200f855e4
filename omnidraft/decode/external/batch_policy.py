"""How much to draft for all texts of a pass together: what gives the most tokens per second, down to nothing.

As decode/policy/cost.py, but rows of all texts share one pass and one step of the drafter, so places and nodes of all
texts compete for them. Rates are told as multiples of plain decoding's, since that changes with the number of texts.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from omnidraft.decode.policy.cost import TRIAL_SHARE

Seconds = Callable[[int], float]
"""By rows."""

_TRIAL_ROUNDS = 4
_CATCH_UP = 4
"""Ids that a drafter at work has to read at most before its next step; more were missed."""
_FOLLOWS = 0.03
_FIRST_ROUNDS = 10
_FIRST_GAIN, _LEAST_GAIN = 0.2, -0.1
"""Tokens that drafting adds for a text in a round, above what the same time gives without."""
_FIRST_EMITS, _FIRST_LENGTH = 2.0, 128.0
"""Tokens of a round, and of an answer, until some were seen."""
_MEMORY = 0.97
"""Of the sums of tokens and seconds, per pass: about 30 passes count."""


class BatchPolicy(Protocol):
    """How much to draft. Values are estimated chances that a text goes through a place or a node."""

    def start(self, num_texts: int) -> None:
        """A round with so many texts is next."""

    def should_draft(self, num_ids: int) -> bool:
        """Whether the drafter drafts for this text, for which it has to read about so many ids first."""

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """How many of these places of all texts, falling in value, the drafter goes on from in one step; 0 ends
        drafting. `num_nodes` were drafted so far."""

    def prune(self, values: Sequence[float]) -> int:
        """How many of these nodes of all texts, best first, the target scores."""

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """The last round: what the target emitted and scored, and the rows of each of the drafter's steps."""

    def finish(self, num_emitted: int) -> None:
        """A text is over, with so many tokens."""


class FixedBatchPolicy:
    """Implements BatchPolicy: always as much as is allowed."""

    def start(self, num_texts: int) -> None:
        """See BatchPolicy."""

    def should_draft(self, num_ids: int) -> bool:
        """See BatchPolicy."""
        return True

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See BatchPolicy."""
        return len(values)

    def prune(self, values: Sequence[float]) -> int:
        """See BatchPolicy."""
        return len(values)

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """See BatchPolicy."""

    def finish(self, num_emitted: int) -> None:
        """See BatchPolicy."""


class ThresholdBatchPolicy(FixedBatchPolicy):
    """Implements BatchPolicy: chains, each until it is too unlikely that the target follows it to its end."""

    def __init__(self, min_path_probability: float) -> None:
        self._min_path_probability = min_path_probability

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See BatchPolicy. The token that made a chain unlikely stays in it."""
        return sum(value >= self._min_path_probability for value in values)


class CostBatchPolicy:
    """Implements BatchPolicy by what passes and steps cost."""

    def __init__(self, pass_s: Seconds, step_s: Seconds) -> None:
        self._pass_s = pass_s
        self._step_s = step_s
        self._num_texts = 1
        self._plain_s = self._seconds = 0.0
        """What the tokens of recent rounds would have taken without drafting, and what they took."""
        self._next_value = 0.5
        """Of the best child of a place that is certain: what one more step of the drafter gives."""
        self._last_value: float | None = None
        self._gain, self._emits, self._length = _FIRST_GAIN, _FIRST_EMITS, _FIRST_LENGTH
        self._num_drafted = 0
        self._idle_s = 0.0
        self._trials_left = 0

    @property
    def speedup(self) -> float:
        """Over plain decoding, of recent rounds; never below it."""
        return max(self._plain_s / self._seconds, 1.0) if self._seconds else 1.0

    def start(self, num_texts: int) -> None:
        """See BatchPolicy."""
        self._num_texts, self._last_value = num_texts, None

    def should_draft(self, num_ids: int) -> bool:
        """See BatchPolicy."""
        missed_s = max(self._step_s(num_ids) - self._step_s(_CATCH_UP), 0.0) if num_ids > _CATCH_UP else 0.0
        earned_s = self._gain * self._length / self._emits * self._token_s()
        if not self._trials_left and earned_s > missed_s:
            return True
        num_texts = self._num_texts
        round_s = self._step_s(num_texts) + self._pass_s(2 * num_texts) - self._pass_s(num_texts)
        trial_s = missed_s + _TRIAL_ROUNDS * round_s
        if not self._trials_left and trial_s < TRIAL_SHARE * self._idle_s:
            self._trials_left, self._idle_s = _TRIAL_ROUNDS, 0.0
        return self._trials_left > 0

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See BatchPolicy."""
        is_first = self._follow(values)
        scored = self._num_texts + num_nodes
        best, gain, tokens = int(is_first and self._trials_left > 0), 0.0, 0.0
        for rows, value in enumerate(values, 1):
            tokens += value * self._next_value
            earned = tokens - self._rate() * (self._step_s(rows) + self._pass_s(scored + rows) - self._pass_s(scored))
            if earned > gain:
                best, gain = rows, earned
        return best

    def prune(self, values: Sequence[float]) -> int:
        """See BatchPolicy."""
        is_trial = self._trials_left > 0 and self._last_value is not None
        best, gain, tokens = int(is_trial and len(values) > 0), 0.0, 0.0
        plain_s = self._pass_s(self._num_texts)
        for num_nodes, value in enumerate(values, 1):
            tokens += value
            earned = tokens - self._rate() * (self._pass_s(self._num_texts + num_nodes) - plain_s)
            if earned > gain:
                best, gain = num_nodes, earned
        return best

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """See BatchPolicy. Seconds are the curves', which are smoother than the clock's; what a drafter had missed
        was paid for when it was read."""
        steps_s = sum(self._step_s(min(rows, _CATCH_UP * self._num_texts)) for rows in step_rows)
        seconds, plain_s = self._pass_s(self._num_texts + num_nodes) + steps_s, num_emitted * self._token_s()
        if step_rows:
            self._drafted(num_emitted / self._num_texts, (plain_s - seconds) / self._pass_s(self._num_texts))
        else:
            self._idle_s += seconds
        self._plain_s = self._plain_s * _MEMORY + plain_s
        self._seconds = self._seconds * _MEMORY + seconds

    def finish(self, num_emitted: int) -> None:
        """See BatchPolicy."""
        self._length += _FOLLOWS * (num_emitted - self._length)

    def _token_s(self) -> float:
        """What a token takes without drafting."""
        return self._pass_s(self._num_texts) / self._num_texts

    def _rate(self) -> float:
        """Tokens per second that further drafting has to beat."""
        return self.speedup / self._token_s()

    def _drafted(self, emits: float, gain: float) -> None:
        """A round with a drafter gave each text so many tokens, so many of them above plain decoding."""
        follows = max(_FOLLOWS, 1 / (_FIRST_ROUNDS + self._num_drafted))
        self._num_drafted += 1
        self._trials_left = max(self._trials_left - 1, 0)
        self._gain = max(self._gain + follows * (gain - self._gain), _LEAST_GAIN)
        self._emits += follows * (emits - self._emits)

    def _follow(self, values: Sequence[float]) -> bool:
        """Learn what the last step gave; True when this is the first question of a round."""
        last, self._last_value = self._last_value, values[0]
        if last:
            self._next_value += _FOLLOWS * (min(values[0] / last, 1.0) - self._next_value)
        return last is None
