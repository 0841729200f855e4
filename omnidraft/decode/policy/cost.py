"""The policy that drafts the tree with the most tokens per second, by the measured costs of passes and drafter steps.

Tokens and seconds are summed over passes; their ratio is the rate that every further node or step must beat with what
it adds to both (Dinkelbach's method for ratios: https://doi.org/10.1287/mnsc.13.7.492; docs/algorithms.md section 10).
When drafting does not beat plain decoding it stops, and is tried again now and then for a small share of the time, so
that a recovery is seen. The measured gain of rounds with a drafter decides that, so no wrong estimate can make it lose
for long. A text that the drafter has not read yet is read only when the rest of the answer is expected to pay for it.
"""

from collections.abc import Sequence

from omnidraft.decode.policy.cost_model import CostCurve

TRIAL_SHARE = 0.02
"""Share of the time without drafting that trials may cost."""
_TRIAL_ROUNDS = 4
_NUM_CANDIDATES = 4
_MAX_ROWS = 4
"""Branches that one step of the drafter extends at most."""
_CATCH_UP = 4
"""Ids that an active drafter reads at most before its next step; more count as catching up."""
_EMA_WEIGHT = 0.03
"""Weight of a new observation in a moving average."""
_FIRST_ROUNDS = 10
"""Rounds that the prior gain counts for."""
_PRIOR_AGREEMENT = 0.65
_FIRST_GAIN, _MIN_GAIN = 0.2, -0.1
"""Tokens per round above plain decoding: the largest prior gain of drafting, and the lowest estimate, so that a few
good trials bring drafting back."""
_FIRST_LENGTH = 128
"""Tokens of an answer, until some were seen."""
_DECAY = 0.97
"""Decay per pass of the sums of tokens and seconds: about 30 passes count."""


class CostPolicy:
    """Implements ports.Policy for one target and mode. Shared by the requests of a snapshot, one at a time."""

    num_candidates = _NUM_CANDIDATES
    uses_acceptance_head = False

    def __init__(self, pass_s: CostCurve, step_s: CostCurve) -> None:
        self._pass_s = pass_s
        self._step_s = step_s
        self._tokens = self._seconds = 0.0
        self._next_value = 0.5
        """Share of a prefix's probability that its best child has: the tokens that one more drafter step gives."""
        self._last_value: float | None = None
        self._gain = min(_FIRST_GAIN, max(_MIN_GAIN, self._prior_gain()))
        self._emits = 2.0
        """Tokens per round with a drafter."""
        self._num_drafted = 0
        self._idle_s = 0.0
        """Seconds without a drafter that no trial was taken from."""
        self._trials_left = 0
        self._length = float(_FIRST_LENGTH)
        self._num_emitted: int | None = None
        self._max_new_tokens = 1

    @property
    def rate(self) -> float:
        """Tokens per second that further drafting must beat; at least that of plain decoding."""
        plain = 1 / self._pass_s(1)
        return max(self._tokens / self._seconds, plain) if self._seconds else plain

    def start(self, max_new_tokens: int) -> None:
        """See ports.Policy."""
        if self._num_emitted:
            self._length += _EMA_WEIGHT * (self._num_emitted - self._length)
        self._num_emitted, self._max_new_tokens, self._last_value = 0, max_new_tokens, None

    def should_draft(self, num_ids: int) -> bool:
        """See ports.Policy."""
        catch_up_s = self._step_s(num_ids) - self._step_s(min(num_ids, _CATCH_UP))
        rounds = min(self._length, self._max_new_tokens) / self._emits
        if not self._trials_left and self._gain * rounds * self._pass_s(1) > catch_up_s:
            return True
        trial_s = catch_up_s + _TRIAL_ROUNDS * (self._step_s(1) + self._pass_s(2) - self._pass_s(1))
        if not self._trials_left and trial_s < TRIAL_SHARE * self._idle_s:
            self._trials_left, self._idle_s = _TRIAL_ROUNDS, 0.0
        return self._trials_left > 0

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. A step over several rows costs little more than one over a single row."""
        is_first, self._last_value = self._update_next_value(values[0]), values[0]
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
        """See ports.Policy. Seconds are those of the cost curves, which are smoother than the clock's; catching up was
        paid for when the ids were read."""
        steps_s = sum(self._step_s(min(rows, _CATCH_UP)) for rows in step_rows)
        seconds = self._pass_s(1 + num_nodes) + steps_s
        if step_rows:
            self._update_gain(num_emitted, num_emitted - seconds / self._pass_s(1))
        else:
            self._idle_s += seconds
        self._tokens = self._tokens * _DECAY + num_emitted
        self._seconds = self._seconds * _DECAY + seconds
        self._num_emitted = (self._num_emitted or 0) + num_emitted
        self._last_value = None

    def _update_gain(self, num_emitted: int, earned: float) -> None:
        """Add a round with a drafter: its tokens, and how many of them exceed plain decoding."""
        weight = max(_EMA_WEIGHT, 1 / (_FIRST_ROUNDS + self._num_drafted))
        self._num_drafted += 1
        self._trials_left = max(self._trials_left - 1, 0)
        self._gain = max(self._gain + weight * (earned - self._gain), _MIN_GAIN)
        self._emits += weight * (num_emitted - self._emits)

    def _prior_gain(self) -> float:
        """Return the gain of the best chain at the prior agreement of a useful drafter."""
        best, tokens = -1.0, 0.0
        for depth in range(1, _MAX_ROWS + 1):
            tokens += _PRIOR_AGREEMENT**depth
            spent_s = self._pass_s(1 + depth) - self._pass_s(1) + depth * self._step_s(1)
            best = max(best, tokens - spent_s / self._pass_s(1))
        return best

    def _update_next_value(self, value: float) -> bool:
        """Update the value of a further step with this one's; return True for the first step of a round."""
        if self._last_value is None:
            return True
        if self._last_value > 0:
            self._next_value += _EMA_WEIGHT * (min(value / self._last_value, 1.0) - self._next_value)
        return False
