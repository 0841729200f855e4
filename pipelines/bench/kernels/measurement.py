"""Times of passes of several engines, which take turns as far as memory holds them all."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
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


@dataclass(slots=True)
class EngineProcess:
    """A running engine."""

    spec: EngineSpec
    process: subprocess.Popen[bytes]
    log_path: Path
    weight_bytes: int = 0

    def ask(self, command: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a command, or the line before any. Raises ModelError when the process died."""
        answer = child.ask(self.process, command)
        if answer is None:
            how = child.exit_name(self.process.wait())
            raise ModelError(f"the process ended with {how}: {child.last_lines(self.log_path)}")
        return answer


@contextmanager
def running(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Load an engine in a process that ends with the context; a build of our kernels is made the first time.

    Raises:
        ModelError: it cannot be loaded, or died of it.
    """
    with tempfile.NamedTemporaryFile() as log:
        environ = bytecode_environment()
        process = child.start_with_pipes(_MODULE, json.dumps(asdict(spec)), log=log.file, environ=environ)
        engine = EngineProcess(spec, process, Path(log.name))
        try:
            facts = engine.ask()
            if reason := facts.get("error"):
                raise ModelError(reason)
            engine.weight_bytes = facts["weight_bytes"]
            yield engine
        finally:
            child.kill(process)


Row = dict[str, Any]
MAX_CELL_S = 30.0
"""An engine is not asked for the same pass again once it has spent so long on it."""


Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The passes to measure."""

    rows: Sequence[int]
    """Rows of a pass; above MAX_ROWS: tokens of a prompt, which every system reads in passes of its own size."""
    repeats: int
    headroom_bytes: int
    """Memory that has to be free for another engine to be loaded beside those that run."""


def measure(specs: Sequence[EngineSpec], plan: KernelPlan) -> Iterator[Row]:
    """Yield the rows of these engines."""
    waiting = list(specs)
    with bar("passes", len(specs) * len(plan.rows) * plan.repeats) as advance:
        while waiting:
            engines: list[EngineProcess] = []
            with ExitStack() as stack:
                while waiting and (not engines or psutil.virtual_memory().available > plan.headroom_bytes):
                    spec = waiting.pop(0)
                    try:
                        engines.append(stack.enter_context(running(spec)))
                    except OmnidraftError as exc:
                        yield _failed(spec, None, str(exc))
                        advance(len(plan.rows) * plan.repeats)
                for num_rows in plan.rows:
                    rows = _measured(engines, num_rows, plan.repeats, advance)
                    yield from rows
                    engines = [each for each, row in zip(engines, rows, strict=True) if row["error"] is None]


def _measured(engines: Sequence[EngineProcess], num_rows: int, repeats: int, advance: Advance) -> list[Row]:
    """Return a row for each engine; they take turns."""
    seconds: dict[EngineSpec, list[float]] = {engine.spec: [] for engine in engines}
    failures: dict[EngineSpec, str] = {}
    for _ in range(repeats):
        for engine in engines:
            spent = seconds[engine.spec]
            if engine.spec not in failures and sum(spent) < MAX_CELL_S:
                try:
                    spent.append(_timed_pass(engine, num_rows))
                except OmnidraftError as exc:
                    failures[engine.spec] = str(exc)
            advance(1)
    return [
        _failed(each.spec, num_rows, failures[each.spec])
        if each.spec in failures
        else _row(each, num_rows, seconds[each.spec])
        for each in engines
    ]


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
    middle, weight_bytes = median(seconds), engine.weight_bytes
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
