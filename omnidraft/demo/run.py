"""The whole circle on real models: serve, trace, learn, publish, swap, and measure the gain.

Real processes: a decoding worker, a distiller, a controller; a real log (SQLite, or Kafka with `--log
kafka://host:port`); a real registry: MLflow where it is installed, else a folder.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft import assembly, config, extras, files, prompts
from omnidraft.demo import report
from omnidraft.demo.answers import recorded, steps_per_snapshot
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.demo.measure import ChatClient, compare, moved_speeds
from omnidraft.demo.recorded import HELD_OUT_EVERY, NUM_TEST, QUESTIONS
from omnidraft.demo.screen import bar, console, spinner
from omnidraft.demo.services import CONFIG_FILE, START_TIMEOUT_S, run_settings, running_services, service_command
from omnidraft.ports import Outgoing, Pause, Registry
from omnidraft.snapshots.manifest import Manifest
from omnidraft.system import usable_processors
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec

LEARN_TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The size of one run."""

    out: Path
    """A folder of this run alone; the report goes above it, too."""
    num_questions: int
    max_tokens: int
    num_recorded: int
    num_live: int
    num_snapshots: int


def run_demo(plan: DemoPlan, log: str | None) -> None:
    """Run the whole circle and write its report.

    Raises:
        ExtraMissing: what a worker needs is not installed.
        RequestError: the recorded answers are too few, or `plan.out` cannot be written.
        ServiceFailed: a service ended, or took too long.
    """
    extras.require("serve", "omnidraft demo")
    settings = demo_settings(plan, log)
    _introduce(plan, settings)
    started = time.monotonic()
    assembly.control_log(settings, CountingMetrics()).put(("pause",), Pause())
    with running_services(plan.out, settings) as (cluster, registry):
        rows, extra = _run(plan, settings, cluster, registry)
    _finish(plan, settings, rows, extra | {"seconds": round(time.monotonic() - started, 1)})


def demo_settings(plan: DemoPlan, log: str | None) -> config.Settings:
    """Write the settings of the demo into its folder and return them. Raises RequestError."""
    steps = steps_per_snapshot(plan.num_recorded, plan.num_snapshots, config.LearnerSettings().records_per_step)
    return run_settings(
        plan.out,
        log,
        decode={"mode": "reproducible"},
        learner={"steps_per_snapshot": steps, "threads": usable_processors(), "held_out_every": HELD_OUT_EVERY},
        worker={"port": free_port()},
    )


def _run(
    plan: DemoPlan, settings: config.Settings, cluster: LocalCluster, registry: Registry
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    url = f"http://{settings.worker.host}:{settings.worker.port}"
    with spinner("starting the worker, which loads both models and measures what its passes cost here"):
        cluster.start("worker", service_command("worker", plan.out))
        cluster.wait_for(lambda: is_serving(url), "serving worker", START_TIMEOUT_S)
    client = ChatClient(url, max_tokens=plan.max_tokens)
    held_out = [prompt.text for prompt in prompts.read(QUESTIONS, plan.num_questions)]
    _wait_for_version(cluster, client, registry, 1, held_out[0])
    with bar("measuring version 1 (the drafter as it comes) against plain decoding", 2 * len(held_out)) as advance:
        measured = [compare(client, held_out, advance)]
    console.print(report.table([measured[0].row()]))
    _send_traffic(plan, settings, client)
    curve = _learn(plan, settings, cluster, registry)
    serving = _wait_for_version(cluster, client, registry, plan.num_snapshots + 1, held_out[0])
    if serving != measured[0].version:
        with bar(f"measuring version {serving} in the same way", 2 * len(held_out)) as advance:
            measured.append(compare(client, held_out, advance))
    rows = [each.row() for each in measured]
    report.picture(curve, rows, plan.out / "report.png", moved := moved_speeds(measured))
    return rows, {
        "identical_texts": sum(each.num_identical for each in measured),
        "compared_texts": len(held_out) * len(rows),
        "moved_plain_tokens_per_s": moved,
        "curve": report.curve_points(curve),
    }


def _introduce(plan: DemoPlan, settings: config.Settings) -> None:
    """Say what will happen, before anything takes time."""
    console.print(
        f"{settings.models.drafter} drafts for {settings.models.target}, which has another tokenizer. It is "
        f"measured, learns from up to {plan.num_recorded} recorded answers and {plan.num_live} live ones, "
        f"and is measured again.\nSome minutes on two cores. Everything, also the services' logs, goes to {plan.out}.",
        soft_wrap=True,
    )


def _send_traffic(plan: DemoPlan, settings: config.Settings, client: ChatClient) -> None:
    """Replay recorded answers into the log, then serve live ones, while learning is paused."""
    held_out, learned = recorded(plan.num_recorded)
    records = [*held_out, *learned]
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    with spinner(f"replaying {len(records)} recorded answers of this target into the log"):
        writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])
    writer.close()
    live = prompts.read(QUESTIONS, plan.num_live, skip=NUM_TEST) if plan.num_live else []
    num_tokens = 0
    with bar(f"serving {len(live)} live questions", len(live)) as advance:
        for prompt in live:
            num_tokens += client.ask(prompt.text, store=True).stats["num_tokens"]
            advance()
    console.print(
        f"traffic: {len(learned)} recorded answers to learn from, {len(held_out)} with "
        f"{sum(len(record.emitted_ids) for record in held_out):,} tokens to judge by, {len(live)} served live "
        f"({num_tokens} tokens)",
        soft_wrap=True,
    )


def _learn(plan: DemoPlan, settings: config.Settings, cluster: LocalCluster, registry: Registry) -> list[Manifest]:
    """Let the distiller learn and judge each snapshot, and show the curve as it grows."""
    per_snapshot = settings.learner.steps_per_snapshot * settings.learner.records_per_step
    last, curve = plan.num_snapshots + 1, list[Manifest]()
    control = assembly.control_log(settings, CountingMetrics())
    control.put(("pause",), None)
    for number in range(2, last + 1):
        with spinner(f"the distiller learns from {per_snapshot} answers, then publishes version {number} of {last}"):
            cluster.wait_for(lambda: registry.versions()[-1].version > len(curve) + 1, "version", LEARN_TIMEOUT_S)
        curve.append(registry.resolve(str(number)).manifest)
        console.print(report.curve_table(curve))
    control.put(("pause",), Pause())
    with spinner("waiting until the distiller rests, so that it does not disturb the measurement"):
        cluster.wait_for(lambda: _is_paused(plan.out), "paused distiller", LEARN_TIMEOUT_S)
    return curve


def _is_paused(out: Path) -> bool:
    """Return whether the distiller said so last, which it does between two steps."""
    said = (out / "logs" / "distiller.log").read_text(encoding="utf-8")
    return said.rfind("learning paused") > said.rfind("learning goes on")


def _wait_for_version(cluster: LocalCluster, client: ChatClient, registry: Registry, number: int, prompt: str) -> int:
    """Wait until the controller has judged this version and the worker serves the champion; return the champion."""

    def is_judged() -> bool:
        judgement = registry.resolve(str(number)).judgement
        return judgement is not None and judgement.is_final

    with spinner(f"waiting until the worker serves version {number}"):
        cluster.wait_for(is_judged, f"judged version {number}", 120.0)
        champion = registry.resolve("champion").version
        if champion != number:
            console.print(f"version {number} did not do better on held-out records; version {champion} stays")
        cluster.wait_for(lambda: _served(client, prompt) == champion, f"worker at version {champion}", 120.0)
    return champion


def _served(client: ChatClient, prompt: str) -> int | None:
    version: int | None = client.ask(prompt, store=False, max_tokens=1).stats["snapshot_version"]
    return version


def _finish(plan: DemoPlan, settings: config.Settings, rows: list[dict[str, Any]], extra: dict[str, Any]) -> None:
    out = plan.out.parent
    plain = sum(row["plain_tokens_per_s"] for row in rows) / len(rows)
    content = {"plain": {"tokens_per_s": plain}, "snapshots": rows} | extra | {"run": str(plan.out)}
    files.save_json(content, out / "report.json")
    (out / "report.png").write_bytes((plan.out / "report.png").read_bytes())
    console.print(report.table(rows, extra["moved_plain_tokens_per_s"]))
    console.print(
        f"{extra['identical_texts']} of {extra['compared_texts']} texts are those of plain decoding, to the last bit\n"
        f"picture: {out / 'report.png'}, figures: {out / 'report.json'}, {extra['seconds']} s\n"
        f"serve what was learned: omnidraft serve --config {plan.out / CONFIG_FILE} --port 8000\n"
        "then ask and watch: http://127.0.0.1:8000/",
        soft_wrap=True,
    )
    if extras.is_installed("mlflow"):
        console.print(f"its history: mlflow ui --backend-store-uri {settings.registry.url}", soft_wrap=True)
