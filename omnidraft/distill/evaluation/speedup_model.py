"""The speed-up that a drafter would give on a machine, from its tokens per pass and the times in the traces.

Times come from the records' own rounds: seconds of a target pass by its rows, and of a draft by the drafter's steps.
Source: docs/algorithms.md, sections 10 and 11.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from omnidraft.traces.record import Rounds, TraceRecord

MIN_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class SpeedupModel:
    """Step times as straight lines through the medians."""

    pass_s: float
    """Seconds of a target pass over one row."""
    row_s: float
    """Seconds of each further row."""
    step_s: float
    """Seconds of the drafter for each token of a chain."""

    def speedup(self, tokens_per_pass: Mapping[int, float]) -> float:
        """Return the speed-up over plain decoding with the best of these chain lengths; at least 1 (no drafting)."""
        ratios = [
            tokens * self.pass_s / (self.pass_s + depth * (self.row_s + self.step_s))
            for depth, tokens in tokens_per_pass.items()
        ]
        return max(1.0, *ratios)


def fit(records: Iterable[TraceRecord]) -> SpeedupModel | None:
    """Fit the step times of these records.

    None when they have too few rounds with a draft, as texts that were only scored, or no times.
    """
    pass_s, step_s = defaultdict[int, list[float]](list), list[float]()
    for record in records:
        for rows, target_s, depth, draft_s in _rounds(record.rounds):
            pass_s[rows].append(target_s)
            if depth and draft_s:
                step_s.append(draft_s / depth)
    if len(step_s) < MIN_ROUNDS:
        return None
    base_s, row_s = _line({rows: median(seconds) for rows, seconds in pass_s.items()})
    return SpeedupModel(base_s, row_s, median(step_s)) if base_s > 0 else None


def _line(seconds_by_rows: Mapping[int, float]) -> tuple[float, float]:
    """Return the seconds of one row and of each further one, by least squares; never falling."""
    rows, seconds = np.array(list(seconds_by_rows)) - 1.0, np.array(list(seconds_by_rows.values()))
    slope = max(float(np.polyfit(rows, seconds, 1)[0]), 0.0) if len(rows) > 1 else 0.0
    return float(np.mean(seconds - slope * rows)), slope


def _rounds(rounds: Rounds) -> Iterable[tuple[int, float, int, float]]:
    """Yield rows, seconds of the pass, drafter steps and their seconds of rounds that drew their tokens. What memory
    and lookup draft takes no step of the drafter."""
    ends, is_step_M = np.cumsum(rounds.num_nodes_R, dtype=np.int64), rounds.drafted_by_model
    for number, end in enumerate(ends.tolist()):
        num_nodes = int(rounds.num_nodes_R[number])
        if rounds.num_emitted_R[number] > rounds.num_accepted_R[number] + 1:
            continue  # a given text, scored many ids at a time
        nodes = slice(end - num_nodes, end)
        num_steps = _num_steps(rounds.parents_M[nodes].tolist(), is_step_M[nodes].tolist())
        yield 1 + num_nodes, float(rounds.target_s_R[number]), num_steps, float(rounds.draft_s_R[number])


def _num_steps(parents: Sequence[int], is_drafters: Sequence[bool]) -> int:
    """Return the most nodes of the drafter on a path."""
    steps = [0]
    for parent, is_step in zip(parents, is_drafters, strict=True):
        steps.append(steps[parent] + is_step)
    return max(steps)
