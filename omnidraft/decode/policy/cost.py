"""The tree that gives the most tokens per second, by what a pass and a drafter's step cost here.

Tokens and seconds are added up as they come; their ratio is the rate that every further node or step has to beat with
what it adds to both (Dinkelbach's method for ratios: https://doi.org/10.1287/mnsc.13.7.492). When drafting does not
beat plain decoding it stops, and is tried again now and then for a small share of the time, so that a recovery is seen.
What stops it is what rounds with a drafter really gave, so no wrong estimate can make it lose for long. A text that the
drafter has not read yet is read only when what is left of the answer will pay for it.
"""

from collections.abc import Sequence

from omnidraft.decode.policy.cost_model import CostCurve

TRIAL_SHARE = 0.02
"""Of the time in which nothing is drafted: what trials may cost."""
_TRIAL_ROUNDS = 4
_NUM_CANDIDATES = 4
_MAX_ROWS = 4
"""Branches that the drafter goes on from at once."""
_CATCH_UP = 4
"""Ids that a drafter at work has to read at most before its next step; more were missed."""
_FOLLOWS = 0.03
_FIRST_ROUNDS = 10
"""Rounds that the first gain counts for."""
_HOPED_AGREEMENT = 0.65
_FIRST_GAIN, _LEAST_GAIN = 0.2, -0.1
"""Tokens a round above plain decoding: what drafting is taken to earn at first at most, and at worst, so that a few
good trials bring it back."""
_FIRST_LENGTH = 128
"""Tokens of an answer, until some were seen."""
_MEMORY = 0.97
"""Of the sums of tokens and seconds, per pass: about 30 passes count."""


class CostPolicy:
    """Implements ports.Policy for one target and mode. Shared by the requests of a snapshot, one at a time."""

    num_candidates = _NUM_CANDIDATES
    uses_acceptance_head = False

    def __init__(self, pass_s: CostCurve, step_s: CostCurve) -> None:
        self._pass_s = pass_s
        self._step_s = step_s
        self._tokens = self._seconds = 0.0
        self._next_value = 0.5
        """Of the best child of a place that is certain: what one more step of the drafter gives."""
        self._last_value: float | None = None
        self._gain = min(_FIRST_GAIN, max(_LEAST_GAIN, self._hoped_gain()))
        self._emits = 2.0
        """Tokens of a round with a drafter."""
        self._num_drafted = 0
        self._idle_s = 0.0
        """Without a drafter, that no trial was made for."""
        self._trials_left = 0
        self._length = float(_FIRST_LENGTH)
        self._num_emitted: int | None = None
        self._longest = 1

    @property
    def rate(self) -> float:
        """Tokens per second that further drafting has to beat; plain decoding's at least."""
        plain = 1 / self._pass_s(1)
        return max(self._tokens / self._seconds, plain) if self._seconds else plain

    def start(self, max_new_tokens: int) -> None:
        """See ports.Policy."""
        if self._num_emitted:
            self._length += _FOLLOWS * (self._num_emitted - self._length)
        self._num_emitted, self._longest, self._last_value = 0, max_new_tokens, None

    def should_draft(self, num_ids: int) -> bool:
        """See ports.Policy."""
        missed_s = self._step_s(num_ids) - self._step_s(min(num_ids, _CATCH_UP))
        rounds = min(self._length, self._longest) / self._emits
        if not self._trials_left and self._gain * rounds * self._pass_s(1) > missed_s:
            return True
        trial_s = missed_s + _TRIAL_ROUNDS * (self._step_s(1) + self._pass_s(2) - self._pass_s(1))
        if not self._trials_left and trial_s < TRIAL_SHARE * self._idle_s:
            self._trials_left, self._idle_s = _TRIAL_ROUNDS, 0.0
        return self._trials_left > 0

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. A step over more rows costs little more than one over a single row."""
        is_first, self._last_value = self._follow(values[0]), values[0]
        node_s = self._pass_s(num_nodes + 2) - self._pass_s(num_nodes + 1)
        best, gain, tokens = int(is_first and self._trials_left > 0), 0.0, 0.0
        for rows, value in enumerate(values[:_MAX_ROWS], 1):
            tokens += value * self._next_value
            earned = tokens - self.rate * (self._step_s(rows) + rows * node_s)
            if earned > gain:
                best, gain = rows, earned
        return best

    def prune(self, values: Sequence[float]) -> int:
        """See ports.Policy."""
        is_trial = self._trials_left > 0 and self._last_value is not None
        best, gain, tokens = int(is_trial and len(values) > 0), 0.0, 0.0
        for num_nodes, value in enumerate(values, 1):
            tokens += value
            earned = tokens - self.rate * (self._pass_s(1 + num_nodes) - self._pass_s(1))
            if earned > gain:
                best, gain = num_nodes, earned
        return best

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """See ports.Policy. Seconds are the curves', which are smoother than the clock's; what a drafter had missed
        was paid for when it was read.
        """
        steps_s = sum(self._step_s(min(rows, _CATCH_UP)) for rows in step_rows)
        seconds = self._pass_s(1 + num_nodes) + steps_s
        if step_rows:
            self._drafted(num_emitted, num_emitted - seconds / self._pass_s(1))
        else:
            self._idle_s += seconds
        self._tokens = self._tokens * _MEMORY + num_emitted
        self._seconds = self._seconds * _MEMORY + seconds
        self._num_emitted = (self._num_emitted or 0) + num_emitted
        self._last_value = None

    def _drafted(self, num_emitted: int, earned: float) -> None:
        """A round with a drafter gave so many tokens, so many of them above plain decoding."""
        follows = max(_FOLLOWS, 1 / (_FIRST_ROUNDS + self._num_drafted))
        self._num_drafted += 1
        self._trials_left = max(self._trials_left - 1, 0)
        self._gain = max(self._gain + follows * (earned - self._gain), _LEAST_GAIN)
        self._emits += follows * (num_emitted - self._emits)

    def _hoped_gain(self) -> float:
        """Of the best chain, were its tokens right as often as those of a drafter that is worth having."""
        best, tokens = -1.0, 0.0
        for depth in range(1, _MAX_ROWS + 1):
            tokens += _HOPED_AGREEMENT**depth
            spent_s = self._pass_s(1 + depth) - self._pass_s(1) + depth * self._step_s(1)
            best = max(best, tokens - spent_s / self._pass_s(1))
        return best

    def _follow(self, value: float) -> bool:
        """Learn what the last step gave; True when this is the first question of a round."""
        if self._last_value is None:
            return True
        if self._last_value > 0:
            self._next_value += _FOLLOWS * (min(value / self._last_value, 1.0) - self._next_value)
        return False
