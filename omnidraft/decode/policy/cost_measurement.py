"""The seconds of passes and drafter steps as a start measures them, and the file that keeps them for the next start."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from omnidraft.files import replace_file
from omnidraft.ports import DraftModel, DraftSession, DraftTree, Mode, Source, Target, TargetSession
from omnidraft.progress import stages

logger = logging.getLogger(__name__)

_REPEATS = 3
_STEP_REPEATS, _STEP_S = 8, 0.25
"""Repeats of a drafter step, as far as they take no more seconds. Steps are short, so one hiccup of the machine can hit
a few in a row, and drafting would not be tried for long."""
PASS_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
STEP_ROWS = (1, 2, 4)
MANY_ROWS = (48, 64, 96, 128, 192, 256, 512)
"""Sizes of passes over many texts' drafts, which would take too long to measure at each start."""
_CONTEXT = 64
"""Ids in the context of the measured rows."""
_MIN_CHANGE = 0.9
"""A pass that takes less than this share of its time at an earlier start: that start measured beside other load."""
_MAX_DIFFERENCE = 1.3
"""Sizes whose times changed by factors further apart: something else computes now, such as another build of our
kernels or another device, or the earlier start was disturbed while it measured one of them."""


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these are computed; those of a processor are."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(device)


class CostFile:
    """Seconds by number of rows, of one target on one machine: of its passes by mode, of steps by drafter."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> dict[int, float]:
        """Return the seconds by number of rows; empty when they were not measured, or cannot be read."""
        try:
            stored = json.loads(self._path.read_text())[name]
            seconds = {int(rows): float(each) for rows, each in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or half written
            return {}
        return seconds if all(each > 0 for each in seconds.values()) else {}

    def write(self, name: str, seconds_by_rows: Mapping[int, float]) -> None:
        """Replace the seconds of this name; where nothing can be written the next start measures again."""
        try:
            replace_file(self._path, json.dumps(self._others(name) | {name: dict(seconds_by_rows)}).encode())
        except OSError as exc:
            logger.warning("the next start has to measure again: %s", exc)

    def _others(self, name: str) -> dict[str, object]:
        try:
            stored = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return {other: each for other, each in stored.items() if other != name} if isinstance(stored, dict) else {}


class _Measure(Protocol):
    def __call__(self, all_rows: Sequence[int], *, num_context: int) -> dict[int, float]:
        """Return the seconds by number of rows, behind so many ids."""


def kept_seconds(
    file: CostFile | None, name: str, measure: _Measure, all_rows: Sequence[int], sizes: Set[int]
) -> dict[int, float]:
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
            return {rows: changes[0] * each for rows, each in _without_noise(seconds).items()}
    seconds = measure(all_rows, num_context=_CONTEXT)
    if file is not None:
        file.write(name, seconds)
    return _without_noise(seconds)


def _without_noise(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return no more for any size than a larger one took: noise only ever adds."""
    return {rows: min(each for more, each in seconds.items() if more >= rows) for rows in seconds}


def measure_passes(target: Target, mode: Mode, all_rows: Sequence[int], *, num_context: int) -> dict[int, float]:
    """Time passes over chains of several lengths; over one length where passes are padded to one width."""
    sizes = pass_sizes(target, mode, all_rows)
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


def pass_sizes(target: Target, mode: Mode, all_rows: Sequence[int]) -> list[int]:
    """Return which of these numbers of rows a mode's passes can have; one where they are padded to it."""
    limits = target.limits(mode)
    is_padded = mode == "reproducible" and limits.num_chains is not None
    return [limits.longest_chain] if is_padded else [rows for rows in all_rows if rows <= limits.longest_chain]


def measure_steps(
    drafter: DraftModel, all_rows: Sequence[int] = STEP_ROWS, *, num_context: int = _CONTEXT
) -> dict[int, float]:
    """Time steps over several branches after a short text, and reading that text."""
    session = drafter.open()
    text = [0] * text_size(drafter, num_context)
    read_s = _fastest_s(partial(_read_s, session, text))
    steps_s = {rows: _fastest_s(partial(_step_s, session, len(text), rows)) for rows in all_rows}
    return {len(text): read_s} | steps_s


def text_size(drafter: DraftModel, num_context: int = _CONTEXT) -> int:
    """Return the ids of the text before measured steps."""
    return max(min(num_context, drafter.context_limit - max(STEP_ROWS)), 1)


def _pass_s(session: TargetSession, rows: int) -> float:
    tree = DraftTree.chain(0, [0] * (rows - 1), [Source.DIRECT] * (rows - 1), [0.0] * (rows - 1))
    started = time.perf_counter()
    wait_for([session.score(tree)])
    spent = time.perf_counter() - started
    session.keep((0,))
    return spent


def _read_s(session: DraftSession, text: Sequence[int]) -> float:
    started = time.perf_counter()
    session.prefill_or_extend(0, text)
    return time.perf_counter() - started


def _step_s(session: DraftSession, num_ids: int, rows: int) -> float:
    session.prefill_or_extend(num_ids - 1, [0])
    started = time.perf_counter()
    session.branch(list(range(rows)), [-1] * rows)
    return time.perf_counter() - started


def _fastest_s(run_s: Callable[[], float]) -> float:
    """Return the shortest of several runs, because noise only ever adds."""
    seconds = [run_s() for _ in range(_REPEATS)]
    while len(seconds) < _STEP_REPEATS and sum(seconds) < _STEP_S:
        seconds.append(run_s())
    return max(min(seconds), 1e-9)
