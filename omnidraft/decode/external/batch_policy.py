"""Policies for all sequences of a pass together: draft what gives the most tokens per second, down to nothing.

Like decode/policy/cost.py, but rows of all sequences share one pass and one step of the drafter, so prefixes and nodes
of all sequences compete for them. Rates are multiples of plain decoding's, since that changes with the number of
sequences.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from omnidraft.decode.policy.cost import TRIAL_SHARE

Seconds = Callable[[int], float]
"""Seconds by number of rows."""

_TRIAL_ROUNDS = 4
_CATCH_UP = 4
"""Ids that an active drafter reads at most before its next step; more count as catching up."""
_EMA_WEIGHT = 0.03
_FIRST_ROUNDS = 10
_FIRST_GAIN, _MIN_GAIN = 0.2, -0.1
"""Tokens that drafting adds per sequence and round to those of plain decoding in the same time."""
_FIRST_EMITS, _FIRST_LENGTH = 2.0, 128.0
"""Tokens of a round, and of an answer, until some were seen."""
_DECAY = 0.97
"""Decay per pass of the sums of tokens and seconds: about 30 passes count."""


class BatchPolicy(Protocol):
    """Decides how much to draft. Values are estimated probabilities that a sequence reaches a prefix or a node."""

    def start(self, num_seqs: int) -> None:
        """Begin a round with this number of sequences."""

    def should_draft(self, num_ids: int) -> bool:
        """Return whether the drafter drafts for this sequence, of which it has to read about `num_ids` ids first."""

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """Return the number of prefixes, of all sequences and falling in value, that one step extends; 0 ends drafting.
        `num_nodes` were drafted so far."""

    def prune(self, values: Sequence[float]) -> int:
        """Return the number of nodes, of all sequences and best first, that the target scores."""

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """Add the last round: tokens that the target emitted, nodes that it scored, and the rows of each drafter
        step."""

    def finish(self, num_emitted: int) -> None:
        """Add the length of a sequence that ended."""


class FixedBatchPolicy:
    """Implements BatchPolicy: drafts to the limits."""

    def start(self, num_seqs: int) -> None:
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
    """Implements BatchPolicy: extends each chain whose end the target reaches with a probability above a threshold."""

    def __init__(self, min_path_probability: float) -> None:
        self._min_path_probability = min_path_probability

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See BatchPolicy. The token that made a chain improbable stays in it."""
        return sum(value >= self._min_path_probability for value in values)


class CostBatchPolicy:
    """Implements BatchPolicy by the costs of passes and drafter steps."""

    def __init__(self, pass_s: Seconds, step_s: Seconds) -> None:
        self._pass_s = pass_s
        self._step_s = step_s
        self._num_seqs = 1
        self._plain_s = self._seconds = 0.0
        """Seconds that recent rounds' tokens would have taken without drafting, and seconds that they took."""
        self._next_value = 0.5
        """Share of a prefix's probability that its best child has: the tokens that one more drafter step gives."""
        self._last_value: float | None = None
        self._gain, self._emits, self._length = _FIRST_GAIN, _FIRST_EMITS, _FIRST_LENGTH
        self._num_drafted = 0
        self._idle_s = 0.0
        self._trials_left = 0

    @property
    def speedup(self) -> float:
        """Speed of recent rounds over plain decoding; at least 1."""
        return max(self._plain_s / self._seconds, 1.0) if self._seconds else 1.0

    def start(self, num_seqs: int) -> None:
        """See BatchPolicy."""
        self._num_seqs, self._last_value = num_seqs, None

    def should_draft(self, num_ids: int) -> bool:
        """See BatchPolicy."""
        catch_up_s = max(self._step_s(num_ids) - self._step_s(_CATCH_UP), 0.0) if num_ids > _CATCH_UP else 0.0
        earned_s = self._gain * self._length / self._emits * self._token_s()
        if not self._trials_left and earned_s > catch_up_s:
            return True
        num_seqs = self._num_seqs
        round_s = self._step_s(num_seqs) + self._pass_s(2 * num_seqs) - self._pass_s(num_seqs)
        trial_s = catch_up_s + _TRIAL_ROUNDS * round_s
        if not self._trials_left and trial_s < TRIAL_SHARE * self._idle_s:
            self._trials_left, self._idle_s = _TRIAL_ROUNDS, 0.0
        return self._trials_left > 0

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See BatchPolicy."""
        is_first = self._update_next_value(values)
        scored = self._num_seqs + num_nodes
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
        plain_s = self._pass_s(self._num_seqs)
        for num_nodes, value in enumerate(values, 1):
            tokens += value
            earned = tokens - self._rate() * (self._pass_s(self._num_seqs + num_nodes) - plain_s)
            if earned > gain:
                best, gain = num_nodes, earned
        return best

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """See BatchPolicy. Seconds are those of the cost curves, which are smoother than the clock's; catching up was
        paid for when the ids were read."""
        steps_s = sum(self._step_s(min(rows, _CATCH_UP * self._num_seqs)) for rows in step_rows)
        seconds, plain_s = self._pass_s(self._num_seqs + num_nodes) + steps_s, num_emitted * self._token_s()
        if step_rows:
            self._update_gain(num_emitted / self._num_seqs, (plain_s - seconds) / self._pass_s(self._num_seqs))
        else:
            self._idle_s += seconds
        self._plain_s = self._plain_s * _DECAY + plain_s
        self._seconds = self._seconds * _DECAY + seconds

    def finish(self, num_emitted: int) -> None:
        """See BatchPolicy."""
        self._length += _EMA_WEIGHT * (num_emitted - self._length)

    def _token_s(self) -> float:
        """Return the seconds per token without drafting."""
        return self._pass_s(self._num_seqs) / self._num_seqs

    def _rate(self) -> float:
        """Return the tokens per second that further drafting must beat."""
        return self.speedup / self._token_s()

    def _update_gain(self, emits: float, gain: float) -> None:
        """Add a round with a drafter: its tokens per sequence, and how many of them exceed plain decoding."""
        weight = max(_EMA_WEIGHT, 1 / (_FIRST_ROUNDS + self._num_drafted))
        self._num_drafted += 1
        self._trials_left = max(self._trials_left - 1, 0)
        self._gain = max(self._gain + weight * (gain - self._gain), _MIN_GAIN)
        self._emits += weight * (emits - self._emits)

    def _update_next_value(self, values: Sequence[float]) -> bool:
        """Update the value of a further step with this one's; return True for the first step of a round."""
        last, self._last_value = self._last_value, values[0]
        if last:
            self._next_value += _EMA_WEIGHT * (min(values[0] / last, 1.0) - self._next_value)
        return last is None
