"""Times of passes of several engines, which take turns as far as memory holds them all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from omnidraft.errors import OmnidraftError
from omnidraft.progress import bar
from pipelines.bench.kernels.engine import MAX_ROWS, EngineSpec
from pipelines.bench.kernels.engine_process import EngineProcess, running
from pipelines.lib.report import ms

Row = dict[str, Any]
MAX_CELL_S = 30.0
"""An engine is not asked for the same pass again once it has spent so long on it."""


Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What is measured."""

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
        "ms": ms(middle),
        "fastest_ms": ms(min(seconds)),
        "gb_per_s": round(weight_bytes / 1e9 / middle, 2) if num_rows <= MAX_ROWS else None,
        "tokens_per_s": round(num_rows / middle, 1),
        "weight_bytes": weight_bytes,
        "repeats": len(seconds),
        "error": None,
    }


def _failed(spec: EngineSpec, num_rows: int | None, reason: str) -> Row:
    figures = dict.fromkeys(("ms", "fastest_ms", "gb_per_s", "tokens_per_s", "weight_bytes"))
    return spec.plain_data() | {"rows": num_rows} | figures | {"repeats": 0, "error": reason}
