"""What a check found. Imports nothing heavy: it must work where libraries are missing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from omnidraft.errors import (
    BusError,
    ConfigError,
    ModelError,
    OmnidraftError,
    RegistryError,
    SnapshotCorrupt,
    VocabularyError,
)


class Verdict(StrEnum):
    """How it is."""

    OK = "ok"
    WARNING = "warning"  # works, but not as well or not for long
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    check: str
    verdict: Verdict
    told: str
    advice: str | None = None
    """What to do about it; None when it is ok."""


def ok(check: str, told: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.OK, told)


def warning(check: str, told: str, advice: str) -> Finding:
    """It works, but not as well or not for long."""
    return Finding(check, Verdict.WARNING, told, advice)


def problem(check: str, told: str, advice: str) -> Finding:
    """It does not work, or will hurt."""
    return Finding(check, Verdict.PROBLEM, told, advice)


def run_check(check: str, look: Callable[[], Finding]) -> Finding:
    """What `look` finds; an error that it did not foresee is a problem of this check, and the others go on."""
    try:
        return look()
    except OmnidraftError as exc:
        return problem(check, str(exc), _advice(exc))


def is_fatal(findings: Iterable[Finding]) -> bool:
    """Whether one of them is a problem."""
    return any(finding.verdict is Verdict.PROBLEM for finding in findings)


def _advice(exc: OmnidraftError) -> str:
    match exc:
        case ConfigError():
            return "correct this setting in the TOML file or the environment (OMNIDRAFT_<SECTION>__<FIELD>)"
        case BusError():
            return "start the log, or correct log.url (OMNIDRAFT_LOG)"
        case RegistryError():
            return "start the registry, or correct registry.url (MLFLOW_TRACKING_URI)"
        case SnapshotCorrupt():
            return "never load it: restore the file from a backup, or promote an intact version"
        case ModelError():
            return "`omnidraft models list` names the models; `omnidraft models pull NAME` fetches one"
        case VocabularyError():
            return "these do not belong together: give both the models that they were made with"
        case _:
            return f"see {type(exc).__name__} in omnidraft/errors.py"
