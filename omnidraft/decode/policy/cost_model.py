"""What a target pass and a drafter's step cost here, by their number of rows: measured at the start, followed since."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from omnidraft.ports import DraftModel, DraftSession, DraftTree, Mode, Source, Target, TargetSession

_FOLLOWS = 0.1
"""Share of a surprise that is believed at once."""
_LARGEST_SURPRISE = math.log(2)
_REPEATS = 3
_PASS_ROWS = (1, 2, 4, 6, 8, 12, 16)
_STEP_ROWS = (1, 2, 4)
_CONTEXT = 64
"""Ids before them."""


class CostCurve:
    """Seconds by rows; never falls with more rows, because that can only be noise."""

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        self._rows = np.array(sorted(seconds_by_rows), np.float64)
        self._log_s = np.log([seconds_by_rows[int(rows)] for rows in self._rows])
        self._tabulate()

    def __call__(self, rows: int) -> float:
        if rows < len(self._table):
            return self._table[rows]
        return self._table[-1] + self._slope * (rows + 1 - len(self._table))

    def update(self, rows: int, seconds: float) -> None:
        """All of the curve moves a little, the part nearest to `rows` twice as much."""
        surprise = math.log(max(seconds, 1e-9) / self(rows))
        moved = _FOLLOWS * min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._log_s += moved
        self._log_s[np.abs(self._rows - rows).argmin()] += moved
        self._tabulate()

    def _tabulate(self) -> None:
        """Seconds of every number of rows up to the last one measured, and what each more costs."""
        seconds = np.maximum.accumulate(np.exp(self._log_s))
        self._table: list[float] = np.interp(np.arange(self._rows[-1] + 1), self._rows, seconds).tolist()
        beyond = np.diff(seconds)[-1:] / np.diff(self._rows)[-1:]
        self._slope = float(beyond[0]) if len(beyond) else 0.0


class MeasuredCosts:
    """Of one target and its drafter on this machine; a mode is measured when it is first asked for."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._passes: dict[Mode, CostCurve] = {}
        self._steps: CostCurve | None = None

    def passes(self, mode: Mode) -> CostCurve:
        """Raises ConfigError when the target cannot serve this mode."""
        if mode not in self._passes:
            self._passes[mode] = measure_passes(self._target, mode)
        return self._passes[mode]

    def plain_pass_s(self, mode: Mode) -> float | None:
        """Of a pass over one row; None while the mode is not measured."""
        return self._passes[mode](1) if mode in self._passes else None

    def steps(self, drafter: DraftModel) -> CostCurve:
        """Measured with the first drafter; later ones differ in their weights only."""
        if self._steps is None:
            self._steps = measure_steps(drafter)
        return self._steps

    def update_pass(self, mode: Mode, rows: int, seconds: float) -> None:
        """A pass took so long; only of interest where the mode was measured."""
        if mode in self._passes:
            self._passes[mode].update(rows, seconds)


def measure_passes(target: Target, mode: Mode) -> CostCurve:
    """Passes over chains of several lengths; over one length where passes are padded to one width."""
    limits = target.limits(mode)
    longest = 1 + min(limits.num_nodes, limits.depth or limits.num_nodes)
    sizes = [longest] if limits.num_chains else [rows for rows in _PASS_ROWS if rows <= longest]
    num_ids = longest + _REPEATS * len(sizes)
    session = target.open([0] * max(min(_CONTEXT, target.context_limit - num_ids), 1), num_ids, mode)
    try:
        return CostCurve({rows: _least(partial(_pass_s, session, rows)) for rows in sizes})
    finally:
        session.close()


def measure_steps(drafter: DraftModel) -> CostCurve:
    """Steps over several branches behind a short text, and reading that text."""
    session = drafter.open()
    text = [0] * max(min(_CONTEXT, drafter.context_limit - max(_STEP_ROWS)), 1)
    read_s = _least(partial(_read_s, session, text))
    steps_s = {rows: _least(partial(_step_s, session, len(text), rows)) for rows in _STEP_ROWS}
    return CostCurve({len(text): read_s} | steps_s)


def _pass_s(session: TargetSession, rows: int) -> float:
    tree = DraftTree.chain(0, [0] * (rows - 1), [Source.DIRECT] * (rows - 1), [0.0] * (rows - 1))
    started = time.perf_counter()
    session.score(tree)
    spent = time.perf_counter() - started
    session.keep((0,))
    return spent


def _read_s(session: DraftSession, text: Sequence[int]) -> float:
    started = time.perf_counter()
    session.advance(0, text)
    return time.perf_counter() - started


def _step_s(session: DraftSession, num_ids: int, rows: int) -> float:
    session.advance(num_ids - 1, [0])
    started = time.perf_counter()
    session.branch(list(range(rows)), [-1] * rows)
    return time.perf_counter() - started


def _least(timed: Callable[[], float]) -> float:
    """Noise only ever adds."""
    return max(min(timed() for _ in range(_REPEATS)), 1e-9)
