"""Run code that a processor may not survive in a process of its own, and cache the outcome.

Processor flags are no proof: a hypervisor may announce instructions that trap. The outcome of a trial is cached in a
folder, by the trial, its arguments, the processor and everything else it depends on.
"""

import hashlib
import json
import logging
import os
import platform
import resource
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from omnidraft.child import CRASHES, describe_exit, exit_name, import_path
from omnidraft.errors import ModelError
from omnidraft.files import replace_file

_TIMEOUT_S = 600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a trial."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of every part that ran and gave correct numbers, by its name."""
    wrong: list[str] = field(default_factory=list)
    """The problems with the numbers of the other parts."""
    died_of: str | None = None
    """The crash signal that ended the process; None when it survived."""
    untried: str | None = None
    """The reason why the trial itself could not run, which says nothing about the processor; None when it ran."""

    @property
    def fault(self) -> str | None:
        """The reason why this cannot be used, None when it can."""
        faults = ([f"dies of {self.died_of}"] if self.died_of else []) + self.wrong
        return "; ".join(faults) or None


def run_once(
    command: Sequence[str],
    *,
    name: str,
    home: Path,
    depends_on: Sequence[object] = (),
    environ: Mapping[str, str] | None = None,
    retry_s: float = 0.0,
) -> Outcome:
    """Run a trial, or return its cached outcome on this processor.

    Args:
        command: a program whose standard output is one JSON object a line, as `report_part` and `report_wrong` write.
        name: names the trial in log messages and errors.
        home: outcomes are cached in a folder of it, as far as it can be written.
        depends_on: everything the outcome depends on besides command and processor.
        environ: variables of the trial's process beside those of this one.
        retry_s: a trial that could not run is not repeated for so long.

    Raises:
        ModelError: the trial itself could not run, which says nothing about the processor.
    """
    cache_file = home / "probes" / f"{_key(command, depends_on, environ or {})}.json"
    with _exclusive(cache_file):
        outcome = _load_cached(cache_file, retry_s)
        if outcome is None:
            outcome = _run(command, name, environ or {})
            _save(cache_file, outcome)
    if outcome.untried is None:
        return outcome
    retry = f"; tried once in {retry_s / 60:.0f} minutes, or after {cache_file.parent} is deleted" if retry_s else ""
    raise ModelError(f"{outcome.untried}{retry}")


def report_part(name: str, seconds: float) -> None:
    """Report from a trial's process that this part gave correct numbers, and its time."""
    print(json.dumps({"name": name, "seconds": seconds}), flush=True)


def report_wrong(problem: str) -> None:
    """Report from a trial's process that a part gave wrong numbers."""
    print(json.dumps({"wrong": problem}), flush=True)


def processor() -> str:
    """Return everything that the kernel reports about this processor except its current speed."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    first = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if not line.lower().startswith(("cpu mhz", "bogomips", "processor")))


def _run(command: Sequence[str], name: str, environ: Mapping[str, str]) -> Outcome:
    logger.info("trying %s on this processor, once", name)
    started = time.perf_counter()
    try:
        ran = subprocess.run(
            command,
            env=os.environ | import_path() | dict(environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            preexec_fn=_without_core_file,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return Outcome(untried=f"{name} could not be tried here: {exc}")
    if ran.returncode and -ran.returncode not in CRASHES:
        message = " ".join(ran.stderr.strip().splitlines()[-1:])
        return Outcome(untried=f"{name} could not be tried here, {describe_exit(ran.returncode)}: {message}")
    outcome = _read(ran)
    logger.info("%s: %s, tried in %.1f s", name, outcome.fault or "sound", time.perf_counter() - started)
    return outcome


def _without_core_file() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(ran: "subprocess.CompletedProcess[str]") -> Outcome:
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return Outcome(
        seconds={line["name"]: line["seconds"] for line in lines if "name" in line},
        wrong=[line["wrong"] for line in lines if "wrong" in line],
        died_of=exit_name(ran.returncode) if ran.returncode else None,
    )


def _key(command: Sequence[str], depends_on: Sequence[object], environ: Mapping[str, str]) -> str:
    facts = (tuple(command[1:]), tuple(map(str, depends_on)), sorted(environ.items()), processor())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


@contextmanager
def _exclusive(cache_file: Path) -> Iterator[None]:
    """Hold a lock, so that of several processes that start together one tries and the others read its outcome."""
    with ExitStack() as stack:
        with suppress(OSError):  # nothing can be written there, so each process tries for itself
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(cache_file.with_suffix(".lock")))
        yield


def _load_cached(cache_file: Path, retry_s: float) -> Outcome | None:
    """Return the outcome, None where there is none or where it is time for another trial."""
    try:
        outcome = Outcome(**json.loads(cache_file.read_text()))
        age_s = time.time() - cache_file.stat().st_mtime
    except (OSError, ValueError, TypeError):  # not there, or half written by a process that was killed
        return None
    return outcome if outcome.untried is None or 0 <= age_s < retry_s else None


def _save(cache_file: Path, outcome: Outcome) -> None:
    try:
        replace_file(cache_file, json.dumps(asdict(outcome)).encode())
    except OSError as exc:
        logger.warning("the next start has to try again, since %s cannot be written: %s", cache_file.parent, exc)
