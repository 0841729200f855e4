"""The service under faults, outages, hostile records and load, on this machine with real processes.

`make soak`, or `python -m tests.soak`. A Kafka broker, an MLflow server and a Ray actor take part. Each part's figures
are in OUT/parts/ as soon as it ends, and OUT/report.json holds the newest of every part, so parts can be run one by
one, or again. The parts are the modules beside this one.
"""

import json
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.cli.choices import chosen
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.files import save_json as save
from omnidraft.hosts import process
from pipelines.lib import machine
from tests.soak.part import Part, PartResult, SoakPlan

PARTS = ("faults", "orders", "broker-down", "fuzz", "throughput", "drift")


def main(
    parts: Annotated[
        str,
        typer.Option(
            help="With commas. faults: SIGKILL, SIGSTOP, full disks, wrong clocks, broken networks and lies, then "
            "account for every record. orders: how long do they take, with the registry stopped? "
            "broker-down: does decoding notice? "
            "fuzz: hostile records through the learner's source. "
            "throughput: records a second through one topic. drift: real models, and traffic that changes its task."
        ),
    ] = ",".join(PARTS[:-1]),
    minutes: Annotated[float, typer.Option(min=0.1, help="Of faults.")] = 30.0,
    pace_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds to the next fault on average, once the fleet is back.")
    ] = 5.0,
    fuzzed: Annotated[int, typer.Option(min=1, help="Hostile records; a million take some 14 minutes.")] = 1_000_000,
    outage_s: Annotated[float, typer.Option(min=1, help="Seconds without broker, twice.")] = 60.0,
    hold_s: Annotated[float, typer.Option(min=1, help="Seconds for which each rate has to be held.")] = 30.0,
    target: Annotated[
        str, typer.Option(help="For broker-down and drift; for the first `tiny` is a random model.")
    ] = "qwen2.5-coder-0.5b",
    drafter: Annotated[str, typer.Option(help="Like --target.")] = "smollm2-135m",
    data: Annotated[Path, typer.Option(help="For drift: a folder of prompt files, JSON lines.")] = Path(
        "../shared/data"
    ),
    tasks: Annotated[str, typer.Option(help="For drift: two of them, before and after the change.")] = "gsm8k,code",
    phase_requests: Annotated[int, typer.Option(min=40, help="For drift: requests of each task.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed: the same faults in the same order, the same records.")] = 0,
    out: Annotated[Path, typer.Option(help="A folder for logs, figures and report.json.")] = Path("runs/soak"),
) -> None:
    """Break a whole fleet on this machine, account for every record, and check what the service promises.

    Exit code 1 when a promise was broken. Figures of each part are saved as it ends, and the report holds the newest of
    every part, so that parts can be run one by one, or again.

    \b
    make soak                                          all of it, an hour and a quarter, into runs/soak/report.json
    python -m tests.soak --parts faults --minutes 2    a first look
    python -m tests.soak --parts broker-down --target tiny --drafter tiny --outage-s 5
    """
    names = chosen(parts, PARTS, "part")
    changing = tuple(chosen(tasks))
    if len(changing) != 2:
        raise RequestError(f"traffic changes from one task to another: two names with a comma, got {tasks!r}")
    plan = SoakPlan(
        out.absolute(),
        seed=seed,
        minutes=minutes,
        pace_s=pace_s,
        fuzzed=fuzzed,
        outage_s=outage_s,
        hold_s=hold_s,
        target=target,
        drafter=drafter,
        data=data,
        tasks=changing,
        phase_requests=phase_requests,
    )
    for name in names:
        _path(plan, name).unlink(missing_ok=True)
        save(_run(name, plan) | machine.made_by("tests.soak"), _path(plan, name))
    report = _report(plan)
    save(report, plan.out / "report.json")
    for name, part in report["parts"].items():
        for promise, held in part["promises"].items():
            print(f"{'held' if held else 'BROKEN'}: {name}: {promise}")
    print(f"report: {out / 'report.json'}")
    if report["broken"]:
        raise typer.Exit(1)


def _part(name: str) -> Part:
    """Import a part only when it runs: its imports may be large."""
    part: Part = import_module(f"tests.soak.{name.replace('-', '_')}").run
    return part


def _run(name: str, plan: SoakPlan) -> dict[str, Any]:
    """Run a part and return its fields of the report; one that fails is a broken promise."""
    print(f"{name} ...", file=sys.stderr)
    started = time.monotonic()
    try:
        result = _part(name)(plan)
    except OmnidraftError as exc:
        result = PartResult({}, {f"{name} runs to its end: {exc}": False})
    seconds = round(time.monotonic() - started, 1)
    return {"figures": result.figures, "promises": result.assertions, "seconds": seconds}


def _path(plan: SoakPlan, name: str) -> Path:
    return plan.out / "parts" / f"{name}.json"


def _report(plan: SoakPlan) -> dict[str, Any]:
    """Return the newest figures of every part that was ever run into this folder."""
    parts = {name: json.loads(_path(plan, name).read_text()) for name in PARTS if _path(plan, name).exists()}
    faults = parts.get("faults", {}).get("figures", {})
    names = ("acknowledged_lost", "learned_twice", "corrupt_served", "requests_failed")
    broken = [f"{name}: {each}" for name, part in parts.items() for each, held in part["promises"].items() if not held]
    return {**{name: faults.get(name) for name in names}, "broken": broken, "parts": parts}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its fleets first
    process.entry("soak", main)
