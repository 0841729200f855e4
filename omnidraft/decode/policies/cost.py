"""The tree that gives the most tokens per second, by what a pass and a drafter's step cost here.

Tokens and seconds are added up as they come; their ratio is the rate that every further node or step has to beat with
what it adds to both (Dinkelbach's method for ratios: https://doi.org/10.1287/mnsc.13.7.492). When drafting does not
beat plain decoding it stops, and is tried again now and then, so that a recovery is seen. What stops it is what rounds
with a drafter really gave, so no wrong estimate can make it lose for long.
"""

from collections.abc import Sequence

from omnidraft.decode.costs import CostCurve

PROBE_EVERY = 32
"""Passes between two tries while nothing is drafted."""
_NUM_CANDIDATES = 4
_MAX_ROWS = 4
"""Branches that the drafter goes on from at once."""
_FOLLOWS = 0.03
_FIRST_GAIN, _LEAST_GAIN = 0.2, -0.1
"""Tokens a round above plain decoding: what drafting is taken to earn at first, and at worst, so that a few good tries
bring it back."""
_MEMORY = 0.97
"""Of the sums of tokens and seconds, per pass: about 30 passes count."""


class CostPolicy:
    """Implements ports.Policy for one target and mode. Shared by the requests of a snapshot, one at a time."""

    num_candidates = _NUM_CANDIDATES
    asks_head = False

    def __init__(self, pass_s: CostCurve, step_s: CostCurve) -> None:
        self._pass_s = pass_s
        self._step_s = step_s
        self._tokens = self._seconds = 0.0
        self._next_value = 0.5
        """Of the best child of a place that is certain: what one more step of the drafter gives."""
        self._last_value: float | None = None
        self._gain = _FIRST_GAIN
        self._num_idle = 0

    @property
    def rate(self) -> float:
        """Tokens per second that further drafting has to beat; plain decoding's at least."""
        plain = 1 / self._pass_s(1)
        return max(self._tokens / self._seconds, plain) if self._seconds else plain

    def expand(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. A step over more rows costs little more than one over a single row."""
        is_first, self._last_value = self._follow(values[0]), values[0]
        if self._gain < 0 and not self._is_probing():
            return 0
        node_s = self._pass_s(num_nodes + 2) - self._pass_s(num_nodes + 1)
        best, gain, tokens = int(is_first and self._is_probing()), 0.0, 0.0
        for rows, value in enumerate(values[:_MAX_ROWS], 1):
            tokens += value * self._next_value
            earned = tokens - self.rate * (self._step_s(rows) + rows * node_s)
            if earned > gain:
                best, gain = rows, earned
        return best

    def keep(self, values: Sequence[float]) -> int:
        """See ports.Policy."""
        best, gain, tokens = int(self._is_probing() and len(values) > 0), 0.0, 0.0
        for num_nodes, value in enumerate(values, 1):
            tokens += value
            earned = tokens - self.rate * (self._pass_s(1 + num_nodes) - self._pass_s(1))
            if earned > gain:
                best, gain = num_nodes, earned
        return best

    def saw(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """See ports.Policy. Seconds are the curves', which are smoother than the clock's."""
        seconds = self._pass_s(1 + num_nodes) + sum(self._step_s(rows) for rows in step_rows)
        if step_rows:
            earned = num_emitted - seconds / self._pass_s(1)
            self._gain = max(self._gain + _FOLLOWS * (earned - self._gain), _LEAST_GAIN)
        self._tokens = self._tokens * _MEMORY + num_emitted
        self._seconds = self._seconds * _MEMORY + seconds
        self._num_idle = 0 if step_rows else self._num_idle + 1
        self._last_value = None

    def _follow(self, value: float) -> bool:
        """Learn what the last step gave; True when this is the first question of a round."""
        if self._last_value is None:
            return True
        if self._last_value > 0:
            self._next_value += _FOLLOWS * (min(value / self._last_value, 1.0) - self._next_value)
        return False

    def _is_probing(self) -> bool:
        return self._num_idle >= PROBE_EVERY
