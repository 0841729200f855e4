"""Costs of passes and drafter steps that are known and that no observation changes: those that a machine measured,
maybe another one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from omnidraft.decode.policy.cost_measurement import MANY_ROWS
from omnidraft.decode.policy.cost_model import CostCurve, MeasuredCosts, StepCosts
from omnidraft.errors import RequestError
from omnidraft.ports import DraftModel, Mode

SecondsByRows = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """What a machine measured of one target and one drafter."""

    about: Mapping[str, str]
    """The target's name and weights, the processor, the drafter."""
    passes: SecondsByRows
    steps: SecondsByRows

    def plain_data(self) -> dict[str, object]:
        """Return it for a JSON file."""
        return asdict(self)


def kept_costs(folder: Path, target: str, drafter: str) -> MachineCosts:
    """Return what the last start with this pair measured on this machine. Raises RequestError where none did."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        stored = json.loads(path.read_text())
        about = stored.pop("about", {})
        steps = {name.removeprefix("steps of "): each for name, each in stored.items() if name.startswith("steps of ")}
        passes = [each for name, each in stored.items() if not name.startswith("steps of ")]
        own = [name for name in steps if name.startswith(f"{drafter} in ")]
        if about.get("target") == target and passes and own:
            return MachineCosts({**about, "drafter": own[-1]}, _by_rows(passes[0]), _by_rows(steps[own[-1]]))
    raise RequestError(
        f"{target} with {drafter} was never started on this machine, so its costs are not known here: start a worker "
        "or `omnidraft generate` with this pair once, or give a file of `omnidraft costs export`"
    )


def read_costs(path: Path) -> MachineCosts:
    """Read a file of `omnidraft costs export`. Raises RequestError."""
    try:
        stored = json.loads(path.read_text())
        return MachineCosts(stored["about"], _by_rows(stored["passes"]), _by_rows(stored["steps"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RequestError(f"{path} is no file of `omnidraft costs export`: {exc}") from exc


def _by_rows(seconds: Mapping[str, float]) -> dict[int, float]:
    return {int(rows): float(each) for rows, each in seconds.items()}


class KnownCosts(MeasuredCosts):
    """The costs of one target and its drafter. `steps` adds up what the drafter's steps would have cost."""

    def __init__(self, costs: MachineCosts) -> None:
        self._curve = CostCurve(costs.passes, [rows for rows in MANY_ROWS if rows > max(costs.passes)])
        self.steps = _CountingCurve(costs.steps)
        self.step_s = _KnownSteps(self.steps)

    def passes(self, mode: Mode) -> CostCurve:
        """See MeasuredCosts; all modes cost the same."""
        return self._curve

    def measured(self, mode: Mode) -> CostCurve:
        """See MeasuredCosts."""
        return self._curve

    def update_pass(self, mode: Mode, rows: int, seconds: float) -> None:
        """Ignore what a pass took here."""


class _CountingCurve(CostCurve):
    def __init__(self, seconds_by_rows: SecondsByRows) -> None:
        super().__init__(seconds_by_rows)
        self._spent_s = 0.0

    def update(self, rows: int, seconds: float) -> bool:
        """Count a step by what it costs, whatever it took here."""
        self._spent_s += self(rows)
        return False

    def take_spent_s(self) -> float:
        """Return the seconds of the steps since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class _KnownSteps(StepCosts):
    def __init__(self, curve: CostCurve) -> None:
        super().__init__()
        self._curve: CostCurve = curve

    def measured(self, drafter: DraftModel) -> CostCurve:
        """See StepCosts; every drafter costs the same."""
        return self._curve
