"""Costs of target passes and drafter steps by number of rows: measured at the start or guessed, updated since."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from omnidraft.decode.policy.cost_measurement import (
    MANY_ROWS,
    PASS_ROWS,
    STEP_ROWS,
    CostFile,
    kept_seconds,
    measure_passes,
    measure_steps,
    pass_sizes,
    text_size,
)
from omnidraft.ports import DraftModel, Mode, Target, TreeLimits

_SCALE_SD, _SHAPE_SD = 1.5, 0.5
"""Doubt about what a start measured, as standard deviations of log seconds: in all sizes alike, since other load makes
all of them slower, and in each size beside the others."""
_SCALE_DRIFT, _SHAPE_DRIFT = 0.03, 0.01
"""Standard deviations of what changes between two observations."""
_NOISE = 0.1
"""Standard deviation of the log seconds of one observation."""
_LEAST_SD = 1.5
"""Standard deviations below the belief that a cost may turn out to be: with 1 a start that finds only further rows ten
times too dear is back after 450 tokens, with 1.5 after 160, and with 2 trials among many texts come twice as often."""
_NUM_FIRST = 65
"""Numbers of rows whose seconds are looked up: a round asks a hundred times, and calls of numpy take long there."""
_MAX_LOG_ERROR = math.log(3)
"""Error that one observation corrects at most: what takes longer may be a hiccup of the machine."""


class CostCurve:
    """Seconds by number of rows; never falls with more rows, because that can only be noise.

    The log seconds of the measured sizes are jointly normal: what all sizes share is far less certain than what tells
    them apart, which neighbours share. Each observation corrects all of them by their covariance with it (a Kalman
    filter, https://doi.org/10.1115/1.3662552), so that a plain pass tells what other load did to passes with drafts."""

    def __init__(self, seconds_by_rows: Mapping[int, float], unmeasured: Sequence[int] = ()) -> None:
        """
        Args:
            unmeasured: larger sizes, taken to go on as the measured ones do, with more doubt at each doubling.
        """
        known = sorted(seconds_by_rows)
        self._rows = np.array([*known, *unmeasured])
        measured_s = [seconds_by_rows[rows] for rows in known]
        row_s = (measured_s[-1] - measured_s[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0
        self._log_s = np.log([*measured_s, *(measured_s[-1] + row_s * (rows - known[-1]) for rows in unmeasured)])
        sizes = np.eye(len(self._rows))
        self._weights = np.stack([np.interp(np.arange(self._rows[-1] + 1), self._rows, each) for each in sizes], axis=1)
        """The share of each size in the seconds of a number of rows."""
        doublings = np.log2(self._rows)
        beyond = np.maximum(doublings - doublings[len(known) - 1], 0)
        near = np.exp(-(np.subtract.outer(doublings, doublings) ** 2) / 2)
        self._covariance = _SCALE_SD**2 + _SHAPE_SD**2 * (near + np.minimum.outer(beyond, beyond))
        self._drift = _SCALE_DRIFT**2 + _SHAPE_DRIFT**2 * near
        self._follow(0)

    def __call__(self, rows: int) -> float:
        if rows < len(self._first_s):
            return self._first_s[rows]
        size = min(rows, len(self._weights) - 1)
        return float(self._weights[size] @ self._seconds) + self._slope * (rows - size)

    def least(self, rows: int, known_rows: int | None = None) -> float:
        """Return the seconds that so many rows may turn out to take: less by what another observation may
        change; with `known_rows` beside those, and no less than they take."""
        doubt, least_s = self._gradient(rows), 0.0
        if known_rows is not None:
            doubt, least_s = doubt - self._gradient(known_rows), self(known_rows)
        variance = doubt @ self._covariance @ doubt
        return max(self(rows) * math.exp(-_LEAST_SD * variance / math.sqrt(variance + _NOISE**2)), least_s)

    def doubt(self) -> None:
        """Know as little as after a start of how slow all sizes are alike."""
        self._covariance += max(_SCALE_SD**2 - self._covariance.min(), 0.0)

    def update(self, rows: int, seconds: float) -> bool:
        """Correct the curve by one observation; return whether other load may have begun or ended."""
        gradient, size = self._gradient(rows), min(rows, len(self._weights) - 1)
        expected = float(self._weights[size] @ self._believed_s) * self(rows) / self(size)
        error = math.log(max(seconds, 1e-9) / expected)
        self._covariance += self._drift
        shared = self._covariance @ gradient
        variance = gradient @ shared + _NOISE**2
        largest = min(3 * math.sqrt(variance), _MAX_LOG_ERROR)
        self._log_s += shared / variance * min(max(error, -largest), largest)
        if is_usual := abs(error) < largest:
            self._covariance -= np.outer(shared, shared) / variance
        else:
            self.doubt()  # it was a hiccup or another load, as the next observation tells
        self._follow(int(np.argmax(gradient)))
        return not is_usual

    def _gradient(self, rows: int) -> np.ndarray:
        """Return how the log seconds of so many rows follow those of each measured size."""
        shares: np.ndarray = self._weights[min(rows, len(self._weights) - 1)] * self._believed_s
        return shares / shares.sum()

    def _follow(self, surest: int) -> None:
        """Take up the log seconds. Smaller sizes take no more than the one that is surest, and larger ones no less."""
        self._believed_s = np.exp(self._log_s)
        seconds = self._believed_s.copy()
        seconds[: surest + 1] = np.minimum.accumulate(seconds[surest::-1])[::-1]
        seconds[surest:] = np.maximum.accumulate(seconds[surest:])
        self._seconds = seconds
        self._first_s = (self._weights[:_NUM_FIRST] @ seconds).tolist()
        self._slope = 0.0
        if len(seconds) > 1:
            self._slope = float((seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2]))


def guessed_passes() -> CostCurve:
    """Return the costs of another engine's passes, which cannot be measured at the start: rows are taken to be cheap,
    so that drafts show what they are."""
    first_s = 0.05
    return CostCurve({1: first_s, 2: first_s * 1.02}, [rows for rows in (*PASS_ROWS, *MANY_ROWS) if rows > 2])


class StepCosts:
    """Seconds of drafter steps by number of rows, measured with the first drafter; what later ones take is observed."""

    def __init__(self, file: CostFile | None = None, drafter_name: str = "") -> None:
        """
        Args:
            file: keeps the costs for the next start; None keeps nothing.
            drafter_name: names the drafter there, and its precision.
        """
        self._file = file
        self._key = f"steps of {drafter_name}"
        self._curve: CostCurve | None = None

    def measured(self, drafter: DraftModel) -> CostCurve:
        """Return the curve, measured with this drafter if it is the first."""
        if self._curve is None:
            sizes = {text_size(drafter), *STEP_ROWS}
            measure = partial(measure_steps, drafter)
            self._curve = CostCurve(kept_seconds(self._file, self._key, measure, STEP_ROWS, sizes))
        return self._curve

    def observe_pass(self, pass_s: CostCurve, rows: int, seconds: float) -> None:
        """Correct the costs of passes by one. What made it another one than believed may do so to drafter steps, which
        may not be observed."""
        if pass_s.update(rows, seconds) and self._curve is not None:
            self._curve.doubt()

    @property
    def curve(self) -> CostCurve:
        """What was measured with a drafter."""
        assert self._curve is not None, "no drafter was measured"
        return self._curve


class MeasuredCosts:
    """Costs of one target and its drafter on this machine; a mode is measured on first use, unless the target takes the
    same trees in a measured one: then their passes are the same."""

    def __init__(self, target: Target, file: CostFile | None = None, drafter_name: str = "") -> None:
        """
        Args:
            file: keeps the costs for the next start; None keeps nothing.
            drafter_name: names the drafter there, and its precision.
        """
        self._target = target
        self._file = file
        self._passes: dict[TreeLimits, CostCurve] = {}
        self.step_s = StepCosts(file, drafter_name)

    def passes(self, mode: Mode) -> CostCurve:
        """Return the cost curve of this mode's passes. Raises ConfigError where they have to be measured and the target
        cannot serve the mode."""
        limits = self._target.limits(mode)
        if limits not in self._passes:
            self._passes[limits] = self._measure(mode)
        return self._passes[limits]

    def _measure(self, mode: Mode) -> CostCurve:
        sizes, measure = pass_sizes(self._target, mode, PASS_ROWS), partial(measure_passes, self._target, mode)
        seconds = kept_seconds(self._file, mode, measure, PASS_ROWS, set(sizes))
        unmeasured = [rows for rows in (*PASS_ROWS, *MANY_ROWS) if rows > sizes[-1]] if len(sizes) > 1 else ()
        return CostCurve(seconds, unmeasured)

    def measured(self, mode: Mode) -> CostCurve | None:
        """Return the cost curve of this mode's passes; None while it is not measured."""
        return self._passes.get(self._target.limits(mode))

    def update_pass(self, mode: Mode, rows: int, seconds: float) -> None:
        """Add the duration of one pass; ignored while its cost curve is not measured."""
        if (curve := self.measured(mode)) is not None:
            self.step_s.observe_pass(curve, rows, seconds)
