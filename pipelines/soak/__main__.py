"""The service under kills, outages, hostile records and load, on this machine with real processes.

`make soak`, or `python -m pipelines.soak`. A Kafka broker, an MLflow server and a Ray actor take part.
Each part's figures are in OUT/parts/ as soon as it ends, and OUT/report.json and the page hold the newest of every
part, so parts can be run one by one. The parts are the modules beside this one.
"""

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.errors import RequestError
from omnidraft.hosts import process
from pipelines.lib import report
from pipelines.lib.check_result import broken_assertions, exit_if_broken, run_part
from pipelines.lib.choices import chosen
from pipelines.soak.plan import Part, SoakPlan

PARTS = ("kills", "broker-down", "registry-down", "rollback", "fuzz", "throughput", "drift")


def main(
    parts: Annotated[
        str,
        typer.Option(
            help="With commas. kills: SIGKILL everybody, then account for every record. broker-down: does decoding "
            "notice? registry-down: who serves meanwhile? rollback: how long does it take? "
            "fuzz: hostile records through the learner's source. "
            "throughput: records a second through one topic. drift: real models, and traffic that changes its task."
        ),
    ] = ",".join(PARTS[:-1]),
    kills: Annotated[int, typer.Option(min=1, help="SIGKILLs; 100 take half an hour on 2 cores.")] = 100,
    pace_s: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds to the next kill on average, once the fleet is back."),
    ] = 5.0,
    fuzzed: Annotated[int, typer.Option(min=1, help="Hostile records; a million take some 14 minutes.")] = 1_000_000,
    outage_s: Annotated[
        float, typer.Option(min=1, help="Seconds without broker, twice; without registry for half as long.")
    ] = 60.0,
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
    seed: Annotated[int, typer.Option(help="The same seed kills in the same order and sends the same records.")] = 0,
    out: Annotated[Path, typer.Option(help="A folder for logs, figures and report.json.")] = Path("runs/soak"),
    markdown: Annotated[
        Path | None, typer.Option(help="A page for people, with pictures beside it; none without it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip the parts whose figures are in OUT already, made with these options.")
    ] = False,
) -> None:
    """Break a whole fleet on this machine, account for every record, and check what the service promises.

    Exit code 1 when a promise was broken. Figures of each part are saved as it ends, and the report holds the newest of
    every part, so that parts can be run one by one, or again.

    \b
    make soak                                               all of it, an hour and a quarter, into runs/reliability.md
    python -m pipelines.soak --parts kills --kills 10       a first look, some 5 minutes
    python -m pipelines.soak --resume                       go on after an interruption
    python -m pipelines.soak --parts broker-down --target tiny --drafter tiny --outage-s 5
    """
    names = chosen(parts, PARTS, "part")
    plan = SoakPlan(
        out.absolute(),
        seed=seed,
        kills=kills,
        pace_s=pace_s,
        fuzzed=fuzzed,
        outage_s=outage_s,
        hold_s=hold_s,
        target=target,
        drafter=drafter,
        data=data,
        tasks=_task_pair(tasks),
        phase_requests=phase_requests,
    )
    for name in names:
        if not (resume and _is_measured(plan, name)):
            _run(name, plan)
    content = _report(plan)
    report.save(content, plan.out / "report.json")
    if markdown is not None:
        from pipelines.soak import page

        page.write(content, markdown)
    print(f"report: {out / 'report.json'}")
    exit_if_broken(content["broken"])


def _task_pair(tasks: str) -> tuple[str, str]:
    names = [name.strip() for name in tasks.split(",")]
    if len(names) != 2:
        raise RequestError(f"traffic changes from one task to another: two names with a comma, got {tasks!r}")
    return names[0], names[1]


def _part(name: str) -> Part:
    """Import a part only when it runs: its imports may be large."""
    match name:
        case "kills":
            from pipelines.soak import kills

            return kills.run
        case "broker-down":
            from pipelines.soak import broker_down

            return broker_down.run
        case "registry-down":
            from pipelines.soak import registry_down

            return registry_down.run
        case "rollback":
            from pipelines.soak import rollback

            return rollback.run
        case "fuzz":
            from pipelines.soak import fuzzing

            return fuzzing.run
        case "drift":
            from pipelines.soak import drift

            return drift.run
        case _:
            from pipelines.soak import throughput

            return throughput.run


def _run(name: str, plan: SoakPlan) -> None:
    """Run one part and save its figures."""
    from pipelines.lib import machine

    path = _path(plan, name)
    path.unlink(missing_ok=True)
    result = run_part(name, lambda: _part(name)(plan))
    about = machine.made_by("pipelines.soak") | {"plan": _fields(plan)}
    report.save(result | about, path)


def _is_measured(plan: SoakPlan, name: str) -> bool:
    """Return whether a part has figures of this plan in the folder: one that did not run to its end has none."""
    path = _path(plan, name)
    if not path.exists():
        return False
    part = json.loads(path.read_text())
    return bool(part["figures"]) and part.get("plan") == _fields(plan)


def _fields(plan: SoakPlan) -> dict[str, Any]:
    """Return the fields of a plan as JSON has them, without its folder."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(plan), default=str))
    del fields["out"]
    return fields


def _path(plan: SoakPlan, name: str) -> Path:
    return plan.out / "parts" / f"{name}.json"


def _report(plan: SoakPlan) -> dict[str, Any]:
    """Return the newest figures of every part that was ever run into this folder."""
    parts = {name: json.loads(_path(plan, name).read_text()) for name in PARTS if _path(plan, name).exists()}
    kills = parts.get("kills", {}).get("figures", {})
    names = ("acknowledged_lost", "learned_twice", "corrupt_served", "requests_failed")
    return {**{name: kills.get(name) for name in names}, "broken": broken_assertions(parts), "parts": parts}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its fleets first
    process.entry("soak", main)
