"""Costs of rounds that are known and that no observation changes: those that a machine measured, maybe another one."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from pathlib import Path

from omnidraft.config.sections import ModelSettings
from omnidraft.decode.policy.cost_measurement import MANY_ROWS
from omnidraft.decode.policy.cost_model import CostCurve, MeasuredCosts, StepCosts
from omnidraft.errors import RequestError
from omnidraft.ports import DraftModel, DraftTree, Mode

SecondsByRows = Mapping[int, float]
BASE, LEARNED = "base", "learned"
"""Kinds of drafters, which may be of another precision."""


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """What a machine measured of one target and one drafter."""

    about: Mapping[str, str]
    """The target's name and weights, the processor, the drafter."""
    passes: SecondsByRows
    steps: Mapping[str, SecondsByRows]
    """By the kind of drafter; a missing one is as the base drafter."""
    others: SecondsByRows
    """What drafting and drawing take of a round beside passes and steps."""

    def of(self) -> str:
        """Return what the costs are of, and of which machine, in words."""
        return "{weights} drafted by {drafter} on {processor}".format_map(defaultdict(lambda: "?", self.about))

    def is_of(self, models: ModelSettings) -> bool:
        """Return whether the costs are of this pair, by the names of its folders."""
        told = (self.about.get("target", ""), self.about.get("drafter", "").rpartition(" in ")[0])
        return [Path(each).name for each in told] == [Path(each).name for each in (models.target, models.drafter)]


def read_costs(path: Path) -> MachineCosts:
    """Read a file of `omnidraft costs export`. Raises RequestError."""
    try:
        stored = json.loads(path.read_text())
        steps = {kind: _by_rows(each) for kind, each in stored["steps"].items()}
        passes, others = _by_rows(stored["passes"]), _by_rows(stored["others"])
        return MachineCosts(stored["about"], passes, {BASE: steps[BASE], **steps}, others)
    except OSError as exc:
        raise RequestError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RequestError(f"{path} is no file of `omnidraft costs export`") from exc


def _by_rows(seconds: Mapping[str, float]) -> dict[int, float]:
    """Return the seconds by rows. Raises ValueError where they are none, or no seconds."""
    found = {int(rows): float(each) for rows, each in seconds.items()}
    if not found or not all(rows > 0 and 0 <= each < inf for rows, each in found.items()):
        raise ValueError
    return found


class KnownCosts(MeasuredCosts):
    """The costs of one target and a drafter of this kind."""

    def __init__(self, costs: MachineCosts, kind: str = BASE) -> None:
        self._curve = CostCurve(costs.passes, [rows for rows in MANY_ROWS if rows > max(costs.passes)])
        self.step_s = _KnownSteps(costs.steps.get(kind, costs.steps[BASE]))
        self._others = CostCurve(costs.others)

    def round_s(self, trees: Sequence[DraftTree]) -> float:
        """Return the seconds of a round that drafted these trees and scored them in one pass."""
        num_rows = sum(map(len, trees))
        steps = [sum(rows) for rows in zip_longest(*(tree.step_rows for tree in trees), fillvalue=0)]
        return self._curve(num_rows) + sum(self.step_s.curve(rows) for rows in steps if rows) + self._others(num_rows)

    def passes(self, mode: Mode) -> CostCurve:
        """See MeasuredCosts; all modes cost the same."""
        return self._curve

    measured = passes

    def update_pass(self, mode: Mode, rows: int, seconds: float) -> None:
        """Ignore what a pass took here."""


class _KnownSteps(StepCosts):
    def __init__(self, seconds_by_rows: SecondsByRows) -> None:
        super().__init__()
        self._curve: CostCurve = _KnownCurve(seconds_by_rows)

    def measured(self, drafter: DraftModel) -> CostCurve:
        """See StepCosts; every drafter costs the same."""
        return self._curve


class _KnownCurve(CostCurve):
    def update(self, rows: int, seconds: float) -> bool:
        """Ignore what a step took here."""
        return False
