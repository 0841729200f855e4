"""The whole circle on real models: serve, trace, learn, publish, swap, and measure the gain.

Real processes: a decoding worker, a distiller, a controller; a real log (SQLite, or Kafka with `--log
kafka://host:port`); a real registry: MLflow where it is installed, else a folder.
"""

import os
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft import assembly, config, extras, files, prompts
from omnidraft.demo import report
from omnidraft.demo.answers import recorded, steps_per_snapshot
from omnidraft.demo.curve import CurvePoint, LearningCurve
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.demo.measure import ChatClient, SpeedComparison, compare, moved_speeds
from omnidraft.demo.recorded import HELD_OUT_EVERY, NUM_TEST, QUESTIONS
from omnidraft.demo.screen import bar, console, downloads, spinner
from omnidraft.errors import RequestError, cannot_write
from omnidraft.ports import Outgoing, Pause, Registry, SnapshotVersion
from omnidraft.system import usable_processors
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec

START_TIMEOUT_S = 600.0
LEARN_TIMEOUT_S = 1200.0
CONFIG_FILE = "config.toml"


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


def run_demo(plan: DemoPlan, log: str | None, target: str | None, drafter: str | None) -> None:
    """Run the whole circle and write its report.

    Raises:
        ExtraMissing: what a worker needs is not installed.
        RequestError: the recorded answers are of another vocabulary pair or too few, or `plan.out` cannot be written.
        ServiceFailed: a service ended, or took too long.
    """
    extras.require("serve", "omnidraft demo")
    settings = config.load(_write_config(plan, log, target, drafter), {})
    _introduce(plan, settings)
    started = time.monotonic()
    with local_cluster(plan) as cluster:
        rows, extra = _run(plan, settings, cluster)
    _finish(plan, settings, rows, extra | {"seconds": round(time.monotonic() - started, 1)})


def local_cluster(plan: DemoPlan) -> LocalCluster:
    """Return the cluster of a run: a user's environment may name a registry and a log that are in use elsewhere."""
    return LocalCluster(plan.out / "logs", config.without_settings(os.environ))


def _run(
    plan: DemoPlan, settings: config.Settings, cluster: LocalCluster
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    url = f"http://{settings.worker.host}:{settings.worker.port}"
    registry = _start_services(plan, settings, cluster, url)
    client = ChatClient(url, max_tokens=plan.max_tokens)
    held_out = [prompt.text for prompt in prompts.read(QUESTIONS, plan.num_questions)]
    _wait_for_version(cluster, client, registry, 1, held_out[0])
    with bar("measuring version 1 (the drafter as it comes) against plain decoding", 2 * len(held_out)) as advance:
        measured = [compare(client, held_out, advance)]
    console.print(report.table([measured[0].row()]))
    traffic = _traffic(plan, settings, client)
    curve = _learn(plan, settings, cluster, registry)
    serving = _wait_for_version(cluster, client, registry, plan.num_snapshots + 1, held_out[0])
    if serving != measured[0].version:
        with bar(f"measuring version {serving} in the same way", 2 * len(held_out)) as advance:
            measured.append(compare(client, held_out, advance))
        _log_metrics(registry, measured[-1])
    rows = [each.row() for each in measured]
    report.picture(curve, rows, plan.out / "report.png", moved := moved_speeds(measured))
    registry.log_file(registry.resolve("champion").version, plan.out / "report.png")
    return rows, traffic | {
        "identical_texts": sum(each.num_identical for each in measured),
        "compared_texts": len(held_out) * len(rows),
        "moved_plain_tokens_per_s": moved,
        "curve": [point.plain_data() for point in curve],
    }


def _introduce(plan: DemoPlan, settings: config.Settings) -> None:
    """Say what will happen, before anything takes time."""
    console.print(
        f"{settings.models.drafter} drafts for {settings.models.target}, which has another tokenizer. It is "
        f"measured, learns from up to {plan.num_recorded} recorded answers and {plan.num_live} live ones, "
        f"and is measured again.\nSome minutes on two cores. Everything, also the services' logs, goes to {plan.out}.",
        soft_wrap=True,
    )


def _service_command(name: str, plan: DemoPlan) -> list[str]:
    return [sys.executable, "-m", "omnidraft.cli", "run", name, "--config", str(plan.out / CONFIG_FILE)]


def _start_services(plan: DemoPlan, settings: config.Settings, cluster: LocalCluster, url: str) -> Registry:
    """Start all services and return their registry. The worker is last and alone: it measures what its passes cost."""
    assembly.control_log(settings, CountingMetrics()).put(("pause",), Pause())
    with _pulled(settings):
        for name in ("controller", "distiller"):  # they wait for the models
            cluster.start(name, _service_command(name, plan))
    _require_recorded_vocabularies(settings)
    registry = assembly.registry(settings)
    with spinner("starting controller and distiller"):
        cluster.wait_for(lambda: bool(registry.versions()), "first version", START_TIMEOUT_S)
    with spinner("starting the worker, which loads both models and measures what its passes cost here"):
        cluster.start("worker", _service_command("worker", plan))
        cluster.wait_for(lambda: is_serving(url), "serving worker", START_TIMEOUT_S)
    return registry


@contextmanager
def _pulled(settings: config.Settings) -> Iterator[None]:
    """Download both models during the `with` block, unless they are on this machine, with a progress bar."""
    from omnidraft.models.catalog import store

    names = settings.models.target, settings.models.drafter
    title = "looking for both models, which are fetched the first time (1.2 GB)"
    with downloads(title) as progress, ThreadPoolExecutor(len(names)) as pool:
        pulls = pool.map(partial(store.resolve, progress=progress), names)
        yield
        list(pulls)  # raises what went wrong


def _require_recorded_vocabularies(settings: config.Settings) -> None:
    held_out, _ = recorded(0)
    if assembly.vocabularies(settings).alignment.fingerprint != held_out[0].alignment:
        raise RequestError(
            f"the demo teaches from recorded answers of {held_out[0].target} for {held_out[0].drafter}: choose models "
            "with their vocabularies, or none; others learn from live traffic (docs/use.md)"
        )


def _traffic(plan: DemoPlan, settings: config.Settings, client: ChatClient) -> dict[str, int]:
    """Replay recorded answers into the log, then serve live ones, while learning is paused."""
    held_out, learned = recorded(plan.num_recorded)
    records = [*held_out, *learned]
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    with spinner(f"replaying {len(records)} recorded answers of this target into the log"):
        writer.append(
            [
                Outgoing(codec.key(record), codec.encode(record), codec.headers(record), tenant=record.tenant)
                for record in records
            ]
        )
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
    return {
        "recorded_answers": len(learned),
        "held_out_answers": len(held_out),
        "live_answers": len(live),
        "live_tokens": num_tokens,
    }


def _learn(plan: DemoPlan, settings: config.Settings, cluster: LocalCluster, registry: Registry) -> list[CurvePoint]:
    """Let the distiller learn, paused while each snapshot is judged, and show the curve as it grows."""
    per_snapshot = settings.learner.steps_per_snapshot * settings.learner.records_per_step
    last = plan.num_snapshots + 1
    curve = LearningCurve(settings, registry, plan.out / "judged")
    control = assembly.control_log(settings, CountingMetrics())
    with spinner("judging the drafter as it comes on recorded answers that nobody learns from"):
        curve.add(registry.versions()[0])
    for number in range(2, last + 1):
        control.put(("pause",), None)
        with spinner(f"the distiller learns from {per_snapshot} answers, then publishes version {number} of {last}"):
            published = _published(cluster, registry, number)
        control.put(("pause",), Pause())  # two processes that compute with all threads would take turns waiting
        with spinner(f"judging version {number}"):
            cluster.wait_until_idle("distiller", LEARN_TIMEOUT_S)
            curve.add(published)
        console.print(report.curve_table(curve.points))
    return curve.points


def _wait_for_version(cluster: LocalCluster, client: ChatClient, registry: Registry, number: int, prompt: str) -> int:
    """Wait until the controller has judged this version and the worker serves the champion; return the champion."""
    deadline = time.monotonic() + 20.0

    def is_judged() -> bool:
        aliases = {alias: each.version for each in registry.versions() for alias in each.aliases}
        is_late = time.monotonic() > deadline
        return aliases.get("champion") == number or (number > 1 and "champion" in aliases and is_late)

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


def _log_metrics(registry: Registry, measured: SpeedComparison) -> None:
    if measured.version is not None:
        names = ("agreement", "tokens_per_pass", "tokens_per_s", "speedup")
        row = measured.row()
        registry.log_metrics(measured.version, {f"measured_{name}": row[name] for name in names}, step=0)


def _published(cluster: LocalCluster, registry: Registry, number: int) -> SnapshotVersion:
    """Wait until the distiller has published this version, and return it."""

    def found() -> list[SnapshotVersion]:
        return [each for each in registry.versions() if each.version == number]

    cluster.wait_for(lambda: bool(found()), f"version {number}", LEARN_TIMEOUT_S)
    return found()[0]


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


def _write_config(plan: DemoPlan, log: str | None, target: str | None, drafter: str | None) -> Path:
    """Write the run's own settings: a fresh log, registry and port, and snapshots as often as the plan says."""
    defaults = config.Settings()
    steps = steps_per_snapshot(plan.num_recorded, plan.num_snapshots, defaults.learner.records_per_step)
    lines = [
        "[models]",
        f'target = "{target or defaults.models.target}"',
        f'drafter = "{drafter or defaults.models.drafter}"',
        "[decode]",
        'mode = "reproducible"',
        "[log]",
        f'url = "{log or f"sqlite:///{plan.out}/log.db"}"',
        f'topic_prefix = "demo-{uuid.uuid4().hex[:8]}"',
        "[registry]",
        f'url = "{_registry_url(plan)}"',
        "[learner]",
        f"steps_per_snapshot = {steps}",
        f"threads = {usable_processors()}",
        f"held_out_every = {HELD_OUT_EVERY}",
        "[worker]",
        f"port = {free_port()}",
    ]
    path = plan.out / CONFIG_FILE
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    except OSError as exc:
        raise cannot_write(path, exc, "another --out") from exc
    return path


def _registry_url(plan: DemoPlan) -> str:
    if extras.is_installed("mlflow"):
        return f"sqlite:///{plan.out}/mlflow.db"
    return f"directory:///{plan.out.absolute()}/registry"
