"""Times of passes of several engines, which take turns as far as memory holds them all."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from omnidraft import child
from omnidraft.errors import ModelError, OmnidraftError
from omnidraft.progress import bar
from pipelines.bench.kernels.engine import MAX_ROWS, EngineSpec
from pipelines.lib.bytecode import bytecode_environment

SOURCE = Path(__file__).with_name("machine_limits.cpp")
LIMITS = {
    "read": "read_gb_per_s",
    "float32": "float32_gop_per_s",
    "bfloat16": "bfloat16_gop_per_s",
    "int8": "int8_gop_per_s",
    "bfloat16-amx": "bfloat16_amx_gop_per_s",
    "int8-amx": "int8_amx_gop_per_s",
}
"""What the program measures -> the name of the figure."""


def machine_limits() -> dict[str, float | str | None]:
    """Compile and run the program; a figure is None where it does not run, which instructions of AMX may not."""
    with tempfile.TemporaryDirectory(prefix="omnidraft-limits-") as folder:
        program = Path(folder) / SOURCE.stem
        compiler = os.environ.get("CXX") or "g++"
        try:
            subprocess.run(
                [compiler, "-std=c++17", "-O3", "-march=native", "-fopenmp", str(SOURCE), "-o", str(program)],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as exc:
            return {"error": f"machine_limits.cpp cannot be compiled: {exc}"}
        return {name: _run(program, what) for what, name in LIMITS.items()}


def _run(program: Path, what: str) -> float | None:
    done = subprocess.run([str(program), what], capture_output=True, text=True)
    return float(done.stdout) or None if done.returncode == 0 else None


_MODULE = "pipelines.bench.kernels.engine"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    spec: EngineSpec
    facts: Mapping[str, int]
    """What its first line says: see engine.py."""
    _process: "subprocess.Popen[bytes]"
    _log: Path

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a command. Raises ModelError when the process died."""
        return _ask(self._process, self._log, command)


@contextmanager
def running(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Load an engine in a process that ends with the context; a build of our kernels is made the first time.

    Raises:
        ModelError: it cannot be loaded, or died of it.
    """
    with tempfile.NamedTemporaryFile() as log:
        process = child.start_with_pipes(
            _MODULE, json.dumps(asdict(spec)), log=log.file, environ=bytecode_environment()
        )
        try:
            facts = _ask(process, Path(log.name))
            if reason := facts.get("error"):
                raise ModelError(reason)
            yield EngineProcess(spec, facts, process, Path(log.name))
        finally:
            child.kill(process)


def _ask(process: "subprocess.Popen[bytes]", log: Path, command: Mapping[str, Any] | None = None) -> dict[str, Any]:
    answer = child.ask(process, command)
    if answer is None:
        raise ModelError(f"the process ended with {child.exit_name(process.wait())}: {child.last_lines(log)}")
    return answer


Row = dict[str, Any]
MAX_CELL_S = 30.0
"""An engine is not asked for the same pass again once it has spent so long on it."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The passes to measure."""

    rows: Sequence[int]
    """Rows of a pass; above MAX_ROWS: tokens of a prompt, which every system reads in passes of its own size."""
    repeats: int
    headroom_bytes: int
    """Memory that has to be free for another engine to be loaded beside those that run."""


@dataclass
class KernelMeasurement:
    """The rows so far, and how they are measured."""

    plan: KernelPlan
    publish: Callable[[Sequence[Row]], None]
    rows: list[Row] = field(default_factory=list)

    def measure(self, specs: Sequence[EngineSpec]) -> None:
        """Measure these engines."""
        waiting = list(specs)
        with bar("passes", len(specs) * len(self.plan.rows) * self.plan.repeats) as advance:
            while waiting:
                with ExitStack() as stack:
                    engines = list(self._loaded(waiting, stack, advance))
                    for num_rows in self.plan.rows:
                        engines = self._measure_rows(engines, num_rows, advance)

    def _loaded(
        self, waiting: list[EngineSpec], stack: ExitStack, advance: Callable[[int], None]
    ) -> Iterator[EngineProcess]:
        """Load engines while there is memory, at least one."""
        num_loaded = 0
        while waiting and (not num_loaded or psutil.virtual_memory().available > self.plan.headroom_bytes):
            spec = waiting.pop(0)
            try:
                yield stack.enter_context(running(spec))
                num_loaded += 1
            except OmnidraftError as exc:
                self.add(_failed(spec, None, str(exc)))
                advance(len(self.plan.rows) * self.plan.repeats)

    def _measure_rows(
        self, engines: Sequence[EngineProcess], num_rows: int, advance: Callable[[int], None]
    ) -> list[EngineProcess]:
        """Add a row for each engine; return those that still run."""
        seconds: dict[EngineSpec, list[float]] = {engine.spec: [] for engine in engines}
        failures: dict[EngineSpec, str] = {}
        for _ in range(self.plan.repeats):
            for engine in engines:
                spent = seconds[engine.spec]
                if engine.spec not in failures and sum(spent) < MAX_CELL_S:
                    try:
                        spent.append(_timed_pass(engine, num_rows))
                    except OmnidraftError as exc:
                        failures[engine.spec] = str(exc)
                advance(1)
        for engine in engines:
            reason = failures.get(engine.spec)
            self.add(_failed(engine.spec, num_rows, reason) if reason else _row(engine, num_rows, seconds[engine.spec]))
        return [engine for engine in engines if engine.spec not in failures]

    def add(self, row: Row) -> None:
        """Add a row and publish all."""
        self.rows.append(row)
        self.publish(self.rows)


def _timed_pass(engine: EngineProcess, num_rows: int) -> float:
    """Return the seconds of a pass right after one like it, or of a prompt.

    The first pass after another engine's finds its threads still spinning, and none of its weights in a cache.
    """
    command = {"pass" if num_rows <= MAX_ROWS else "prompt": num_rows}
    if num_rows <= MAX_ROWS:
        engine.ask(command)
    seconds: float = engine.ask(command)["seconds"]
    return seconds


def _row(engine: EngineProcess, num_rows: int, seconds: Sequence[float]) -> Row:
    middle = median(seconds)
    weight_bytes = engine.facts["weight_bytes"]
    return engine.spec.plain_data() | {
        "rows": num_rows,
        "ms": round(1000 * middle, 3),
        "fastest_ms": round(1000 * min(seconds), 3),
        "gb_per_s": round(weight_bytes / 1e9 / middle, 2) if num_rows <= MAX_ROWS else None,
        "tokens_per_s": round(num_rows / middle, 1),
        "weight_bytes": weight_bytes,
        "repeats": len(seconds),
        "error": None,
    }


def _failed(spec: EngineSpec, num_rows: int | None, reason: str) -> Row:
    figures = dict.fromkeys(("ms", "fastest_ms", "gb_per_s", "tokens_per_s", "weight_bytes"))
    return spec.plain_data() | {"rows": num_rows} | figures | {"repeats": 0, "error": reason}
