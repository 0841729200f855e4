"""Costs of target passes and drafter steps on this machine by number of rows: measured at the start, updated since."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Protocol

import numpy as np
import torch

from omnidraft.decode.policy.cost_file import CostFile
from omnidraft.ports import DraftModel, DraftSession, DraftTree, Mode, Source, Target, TargetSession, TreeLimits
from omnidraft.progress import stages


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these are computed; those of a processor are."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(device)


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
_MAX_LOG_ERROR = math.log(3)
"""Error that one observation corrects at most: what takes longer may be a hiccup of the machine."""
_REPEATS = 3
_STEP_REPEATS, _STEP_S = 8, 0.25
"""Repeats of a drafter step, as far as they take no more seconds. Steps are short, so one hiccup of the machine can hit
a few in a row, and drafting would not be tried for long."""
_PASS_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_STEP_ROWS = (1, 2, 4)
_CONTEXT = 64
"""Ids in the context of the measured rows."""
_MIN_CHANGE = 0.9
"""A pass that takes less than this share of its time at an earlier start: that start measured beside other load."""
_MAX_DIFFERENCE = 1.3
"""Sizes whose times changed by factors further apart: something else computes now, such as another build of our
kernels or another device, or the earlier start was disturbed while it measured one of them."""


class Seconds(Protocol):
    """Seconds by number of rows, and the least that they may be; see CostCurve."""

    def __call__(self, rows: int) -> float: ...

    def least(self, rows: int, known_rows: int | None = None) -> float: ...


class CostCurve:
    """Seconds by number of rows; never falls with more rows, because that can only be noise.

    The log seconds of the measured sizes are jointly normal: what all sizes share is far less certain than what tells
    them apart, which neighbours share. Each observation corrects all of them by their covariance with it (a Kalman
    filter, https://doi.org/10.1115/1.3662552), so that a plain pass tells what other load did to passes with drafts."""

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        self._rows = np.array(sorted(seconds_by_rows))
        self._log_s = np.log([seconds_by_rows[int(rows)] for rows in self._rows])
        sizes = np.eye(len(self._rows))
        self._weights = np.stack([np.interp(np.arange(self._rows[-1] + 1), self._rows, each) for each in sizes], axis=1)
        """The share of each measured size in the seconds of a number of rows."""
        near = np.exp(-(np.subtract.outer(np.log2(self._rows), np.log2(self._rows)) ** 2) / 2)
        self._covariance = _SCALE_SD**2 + _SHAPE_SD**2 * near
        self._drift = _SCALE_DRIFT**2 + _SHAPE_DRIFT**2 * near
        self._tabulate(0)

    def __call__(self, rows: int) -> float:
        if rows < len(self._table):
            return self._table[rows]
        return self._table[-1] + self._slope * (rows + 1 - len(self._table))

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
        gradient, last = self._gradient(rows), len(self._table) - 1
        expected = self._weights[min(rows, last)] @ np.exp(self._log_s) * self(rows) / self(min(rows, last))
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
        self._tabulate(int(np.argmax(gradient)))
        return not is_usual

    def _gradient(self, rows: int) -> np.ndarray:
        """Return how the log seconds of so many rows follow those of each measured size."""
        shares = self._weights[min(rows, len(self._table) - 1)] * np.exp(self._log_s)
        return shares / shares.sum()

    def _tabulate(self, surest: int) -> None:
        """Tabulate the seconds up to the largest measured number of rows, and the slope beyond it. Smaller sizes take
        no more than the one that is surest, and larger ones no less."""
        seconds = np.exp(self._log_s)
        seconds[: surest + 1] = np.minimum.accumulate(seconds[surest::-1])[::-1]
        seconds[surest:] = np.maximum.accumulate(seconds[surest:])
        self._table: list[float] = (self._weights @ seconds).tolist()
        beyond = np.diff(seconds)[-1:] / np.diff(self._rows)[-1:]
        self._slope = float(beyond[0]) if len(beyond) else 0.0


class StepCosts:
    """Seconds of drafter steps by number of rows, measured with the first drafter; later ones differ in their weights
    only."""

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
            sizes = {_text_size(drafter), *_STEP_ROWS}
            self._curve = _kept_curve(self._file, self._key, partial(measure_steps, drafter), _STEP_ROWS, sizes)
        return self._curve

    def doubt(self) -> None:
        """See CostCurve."""
        if self._curve is not None:
            self._curve.doubt()

    def __call__(self, rows: int) -> float:
        assert self._curve is not None, "no drafter was measured"
        return self._curve(rows)

    def least(self, rows: int, known_rows: int | None = None) -> float:
        """See CostCurve."""
        assert self._curve is not None, "no drafter was measured"
        return self._curve.least(rows, known_rows)


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
        sizes, measure = _sizes(self._target, mode, _PASS_ROWS), partial(measure_passes, self._target, mode)
        return _kept_curve(self._file, mode, measure, _PASS_ROWS, set(sizes))

    def measured(self, mode: Mode) -> CostCurve | None:
        """Return the cost curve of this mode's passes; None while it is not measured."""
        return self._passes.get(self._target.limits(mode))

    def update_pass(self, mode: Mode, rows: int, seconds: float) -> None:
        """Add the duration of one pass; ignored while its cost curve is not measured. What made it another one than
        believed may do so to drafter steps, which may not be observed."""
        if (curve := self.measured(mode)) is not None and curve.update(rows, seconds):
            self.step_s.doubt()


class _Measure(Protocol):
    def __call__(self, all_rows: Sequence[int], *, num_context: int) -> dict[int, float]:
        """Return the seconds by number of rows, behind so many ids."""


def _kept_curve(
    file: CostFile | None, name: str, measure: _Measure, all_rows: Sequence[int], sizes: Set[int]
) -> CostCurve:
    """Return the costs of an earlier start, scaled by that of the smallest size now; measured anew, and kept for the
    next start, without them, when it measured other sizes, when the machine was busy then, or when larger sizes did
    not change alike. On a busy machine all sizes are slower, and measuring them would take longest."""
    stages.info("measuring costs on this machine (%s), up to 10 s if nothing else computes here", name)
    seconds = {} if file is None else file.read(name)
    if seconds.keys() == sizes:
        ranked = sorted(seconds)
        checked = sorted({ranked[0], *({ranked[len(ranked) * part // 4] for part in (2, 3)} & set(all_rows))})
        now = measure(checked, num_context=1)
        changes = [now[rows] / seconds[rows] for rows in checked]
        if min(changes) > _MIN_CHANGE and max(changes) < _MAX_DIFFERENCE * min(changes):
            return CostCurve({rows: changes[0] * each for rows, each in _without_noise(seconds).items()})
    seconds = measure(all_rows, num_context=_CONTEXT)
    if file is not None:
        file.write(name, seconds)
    return CostCurve(_without_noise(seconds))


def _without_noise(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return no more for any size than a larger one took: noise only ever adds."""
    return {rows: min(each for more, each in seconds.items() if more >= rows) for rows in seconds}


def measure_passes(target: Target, mode: Mode, all_rows: Sequence[int], *, num_context: int) -> dict[int, float]:
    """Time passes over chains of several lengths; over one length where passes are padded to one width."""
    sizes = _sizes(target, mode, all_rows)
    num_ids = target.limits(mode).longest_chain + _REPEATS * len(sizes)
    session = target.open([0] * max(min(num_context, target.context_limit - num_ids), 1), num_ids, mode)
    try:
        # all sizes in turn, so that other load for a second spoils one run of each and not all runs of one; each time
        # in another order, so that load in equal intervals meets other sizes
        starts = [len(sizes) * number // _REPEATS for number in range(_REPEATS)]
        seconds = dict.fromkeys(sizes, math.inf)
        for rows in [rows for start in starts for rows in sizes[start:] + sizes[:start]]:
            seconds[rows] = max(min(seconds[rows], _pass_s(session, rows)), 1e-9)
        return seconds
    finally:
        session.close()


def _sizes(target: Target, mode: Mode, all_rows: Sequence[int]) -> list[int]:
    """Return which of these numbers of rows a mode's passes can have; one where they are padded to it."""
    limits = target.limits(mode)
    is_padded = mode == "reproducible" and limits.num_chains is not None
    return [limits.longest_chain] if is_padded else [rows for rows in all_rows if rows <= limits.longest_chain]


def measure_steps(
    drafter: DraftModel, all_rows: Sequence[int] = _STEP_ROWS, *, num_context: int = _CONTEXT
) -> dict[int, float]:
    """Time steps over several branches after a short text, and reading that text."""
    session = drafter.open()
    text = [0] * _text_size(drafter, num_context)
    read_s = _fastest_s(partial(_read_s, session, text))
    steps_s = {rows: _fastest_s(partial(_step_s, session, len(text), rows)) for rows in all_rows}
    return {len(text): read_s} | steps_s


def _text_size(drafter: DraftModel, num_context: int = _CONTEXT) -> int:
    """Return the ids of the text before measured steps."""
    return max(min(num_context, drafter.context_limit - max(_STEP_ROWS)), 1)


def _pass_s(session: TargetSession, rows: int) -> float:
    tree = DraftTree.chain(0, [0] * (rows - 1), [Source.DIRECT] * (rows - 1), [0.0] * (rows - 1))
    started = time.perf_counter()
    wait_for([session.score(tree)])
    spent = time.perf_counter() - started
    session.keep((0,))
    return spent


def _read_s(session: DraftSession, text: Sequence[int]) -> float:
    started = time.perf_counter()
    wait_for([session.prefill_or_extend(0, text)])
    return time.perf_counter() - started


def _step_s(session: DraftSession, num_ids: int, rows: int) -> float:
    session.prefill_or_extend(num_ids - 1, [0])
    started = time.perf_counter()
    wait_for([session.branch(list(range(rows)), [-1] * rows)])
    return time.perf_counter() - started


def _fastest_s(run_s: Callable[[], float]) -> float:
    """Return the shortest of several runs, because noise only ever adds."""
    seconds = [run_s() for _ in range(_REPEATS)]
    while len(seconds) < _STEP_REPEATS and sum(seconds) < _STEP_S:
        seconds.append(run_s())
    return max(min(seconds), 1e-9)
