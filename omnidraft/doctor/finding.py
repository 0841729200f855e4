"""The finding of a check. This module imports nothing heavy: it must work where libraries are missing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from omnidraft.errors import (
    BusError,
    ConfigError,
    ModelError,
    OmnidraftError,
    RegistryError,
    SettingsUnreadable,
    SnapshotCorrupt,
    VocabularyError,
)


class Verdict(StrEnum):
    """The verdict of a check."""

    OK = "ok"
    WARNING = "warning"  # works, but not as well or not for long
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    verdict: Verdict
    told: str
    """The observation; the field name is part of the JSON report."""
    advice: str | None = None
    """The recommended action; None when the verdict is ok."""


def ok(check: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, Verdict.OK, message)


def warning(check: str, message: str, advice: str) -> Finding:
    """Return a finding about something that works, but not well or not for long."""
    return Finding(check, Verdict.WARNING, message, advice)


def problem(check: str, message: str, advice: str) -> Finding:
    """Return a finding about something that does not work, or will cause damage."""
    return Finding(check, Verdict.PROBLEM, message, advice)


def run_check(check: str, look: Callable[[], Finding]) -> Finding:
    """Return the finding of `look`; an error becomes a problem of this check, so that the others still run."""
    try:
        return look()
    except OmnidraftError as exc:
        return problem(check, str(exc), _advice(exc))
    except Exception as exc:  # of a library below, which should have been ours
        return problem(check, f"{type(exc).__name__}: {exc}", "please report this: a check should say what is wrong")


def is_fatal(findings: Iterable[Finding]) -> bool:
    """Return whether one of the findings is a problem."""
    return any(finding.verdict is Verdict.PROBLEM for finding in findings)


def _advice(exc: OmnidraftError) -> str:
    match exc:
        case SettingsUnreadable():
            return "correct --config, or the file"
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
