"""The whole circle on real models: serve, trace, learn, publish, swap, and measure the gain.

`python -m pipelines.demo`. Real processes: a decoding worker, a distiller (a Ray actor), a controller; a real log
(SQLite, or Kafka with `--log kafka://host:port`); a real registry (MLflow).
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from omnidraft import config, prompts, wiring
from omnidraft.fleet.control_log import publish_announcement
from omnidraft.hosts import process
from omnidraft.ports import Outgoing, Registry, SnapshotVersion
from omnidraft.traces import archive, codec
from omnidraft.traces.record import TraceRecord
from pipelines.demo.measure import ChatClient, SpeedComparison, compare
from pipelines.lib import report
from pipelines.lib.local_cluster import LocalCluster, free_port, is_serving

DATA = Path(__file__).parents[1] / "data"
QUESTIONS = DATA / "gsm8k.jsonl"
NUM_TEST = 24
"""The number of questions at the beginning of the file that are the test split; the rest are live traffic."""
RECORDED = DATA / "gsm8k_qwen1.5b.avro"
HELD_OUT_EVERY = 6
"""One record in this many, chosen by its hash, judges the snapshots; with few records the share is not exact."""
START_TIMEOUT_S = 600.0
LEARN_TIMEOUT_S = 1200.0

REFRESH_PER_S = 2.0
"""The refresh rate of the screen, low so that drawing does not disturb the measurement."""

console = Console()


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The size of one run."""

    out: Path
    num_questions: int
    max_tokens: int
    num_recorded: int
    num_live: int
    num_snapshots: int


def main(
    log: Annotated[
        str | None, typer.Option(help="sqlite:///path or kafka://host:port; a fresh SQLite file if absent.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for everything that this run writes.")] = Path("runs/demo"),
    target: Annotated[str | None, typer.Option(help="The model to speed up.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The small model that learns.")] = None,
    num_questions: Annotated[int, typer.Option(min=1, max=NUM_TEST, help="Held-out questions to measure on.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per measured answer.")] = 64,
    num_recorded: Annotated[
        int, typer.Option(min=0, help="Recorded answers replayed before live traffic, at most.")
    ] = 100,
    num_live: Annotated[int, typer.Option(min=0, max=40, help="Questions served as live traffic.")] = 4,
    num_snapshots: Annotated[int, typer.Option(min=1, help="Snapshots to learn.")] = 1,
) -> None:
    """Watch a drafter with another vocabulary learn from a target's traffic and speed it up."""
    plan = DemoPlan(
        out / time.strftime("%Y%m%d-%H%M%S"), num_questions, max_tokens, num_recorded, num_live, num_snapshots
    )
    plan.out.mkdir(parents=True, exist_ok=True)
    config_path = _write_config(plan, log, target, drafter)
    settings = config.load(config_path, {})
    _pull(settings)
    started = time.monotonic()
    with LocalCluster(config_path, plan.out / "logs") as cluster:
        rows, extra = _run(plan, settings, cluster)
    _finish(out, plan, settings, rows, extra | {"seconds": round(time.monotonic() - started, 1)})


def _run(
    plan: DemoPlan, settings: config.Settings, cluster: LocalCluster
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    url = f"http://{settings.worker.host}:{settings.worker.port}"
    control = wiring.log_writer(settings, settings.log.control_topic)
    publish_announcement(control, "pause")
    with _spinner("starting controller, distiller and worker (loading both models)"):
        for name in ("controller", "distiller", "decode_worker"):
            cluster.start(name)
        cluster.wait_for(lambda: is_serving(url), "serving worker", START_TIMEOUT_S)
    registry = wiring.registry(settings)
    client = ChatClient(url, max_tokens=plan.max_tokens)
    held_out = [prompt.text for prompt in prompts.read(QUESTIONS, plan.num_questions)]
    _wait_for_version(cluster, client, registry, 1, held_out[0])
    first = _measure(client, held_out, "measuring version 1 (the drafter as it comes) against plain decoding")
    num_identical = _num_identical(client, held_out, first)
    traffic = _traffic(plan, settings, client)
    measured = [first]
    for number in range(2, plan.num_snapshots + 2):
        publish_announcement(control, "resume")
        _learn(cluster, registry, number, settings)
        publish_announcement(control, "pause")
        cluster.wait_until_idle("distiller", LEARN_TIMEOUT_S)
        serving = _wait_for_version(cluster, client, registry, number, held_out[0])
        if serving != number:
            continue
        latest = _measure(client, held_out, f"measuring version {serving}")
        num_identical += _num_same(latest, first)
        _log_metrics(registry, latest)
        measured.append(latest)
    rows = [each.row() for each in measured]
    picture = plan.out / "report.png"
    report.picture(rows, picture)
    registry.log_file(registry.resolve("champion").version, picture)
    return rows, {"identical_texts": num_identical, "compared_texts": len(held_out) * len(rows)} | traffic


def _pull(settings: config.Settings) -> None:
    """Download both models with a progress bar, unless they are on this machine."""
    from omnidraft.models.catalog import store

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name in (settings.models.target, settings.models.drafter):
            store.resolve(name, progress=progress)


def _traffic(plan: DemoPlan, settings: config.Settings, client: ChatClient) -> dict[str, int]:
    """Replay recorded answers into the log, then serve live ones, while learning is paused."""
    records = _recorded(plan)
    writer = wiring.log_writer(settings, settings.log.traces_topic)
    with _spinner(f"replaying {len(records)} recorded answers of this target into the log"):
        writer.append(
            [
                Outgoing(codec.key(record), codec.encode(record), codec.headers(record), tenant=record.tenant)
                for record in records
            ]
        )
    writer.close()
    live = prompts.read(QUESTIONS, plan.num_live, skip=NUM_TEST) if plan.num_live else []
    num_tokens = 0
    with _bar(f"serving {len(live)} live questions", len(live)) as advance:
        for prompt in live:
            num_tokens += client.ask(prompt.text, store=True).stats["num_tokens"]
            advance()
    console.print(f"traffic: {len(records)} recorded answers replayed, {len(live)} served live ({num_tokens} tokens)")
    return {"recorded_answers": len(records), "live_answers": len(live), "live_tokens": num_tokens}


def _learn(cluster: LocalCluster, registry: Registry, number: int, settings: config.Settings) -> None:
    per_snapshot = settings.learner.steps_per_snapshot * settings.learner.records_per_step
    with _spinner(f"the Ray actor learns from {per_snapshot} answers, then publishes version {number} to MLflow"):
        cluster.wait_for(lambda: _newest(registry).version >= number, f"version {number}", LEARN_TIMEOUT_S)
    manifest = _newest(registry).manifest
    losses = ", ".join(f"{name} {value:.3f}" for name, value in manifest.losses.items())
    console.print(f"version {number}: {manifest.num_tokens} tokens learned, {losses}")


def _wait_for_version(cluster: LocalCluster, client: ChatClient, registry: Registry, number: int, prompt: str) -> int:
    """Wait until the controller has judged this version and the worker serves the champion; return the champion."""

    def is_judged() -> bool:
        aliases = {alias: each.version for each in registry.versions() for alias in each.aliases}
        return aliases.get("champion") == number or (number > 1 and "champion" in aliases and is_late())

    deadline = time.monotonic() + 20.0

    def is_late() -> bool:
        return time.monotonic() > deadline

    with _spinner(f"waiting until the worker serves version {number}"):
        cluster.wait_for(is_judged, f"judged version {number}", 120.0)
        champion = registry.resolve("champion").version
        if champion != number:
            console.print(f"version {number} did not do better on held-out records; version {champion} stays")
        cluster.wait_for(lambda: _served(client, prompt) == champion, f"worker at version {champion}", 120.0)
    return champion


def _served(client: ChatClient, prompt: str) -> int | None:
    version: int | None = client.ask(prompt, store=False, max_tokens=1).stats["snapshot_version"]
    return version


def _measure(client: ChatClient, held_out: Sequence[str], title: str) -> SpeedComparison:
    with _bar(title, 2 * len(held_out)) as advance:
        comparison = compare(client, held_out, advance)
    console.print(report.table([comparison.row()]))
    return comparison


def _num_identical(client: ChatClient, held_out: Sequence[str], drafted: SpeedComparison) -> int:
    """Count the drafted texts that are plain decoding's, both with passes of one width."""
    same = 0
    with _bar("comparing texts with plain decoding, bit for bit", len(held_out)) as advance:
        for prompt, reply in zip(held_out, drafted.drafted, strict=True):
            same += client.ask(prompt, store=False, speculation="off").text == reply.text
            advance()
    return same


def _num_same(measured: SpeedComparison, first: SpeedComparison) -> int:
    """Count the texts of a later snapshot that equal version 1's, and so plain decoding's where those do."""
    return sum(a.text == b.text for a, b in zip(measured.drafted, first.drafted, strict=True))


def _log_metrics(registry: Registry, measured: SpeedComparison) -> None:
    if measured.version is not None:
        names = ("agreement", "tokens_per_pass", "tokens_per_s", "speedup")
        row = measured.row()
        registry.log_metrics(measured.version, {f"measured_{name}": row[name] for name in names}, step=0)


def _newest(registry: Registry) -> SnapshotVersion:
    return registry.versions()[-1]


def _finish(
    out: Path, plan: DemoPlan, settings: config.Settings, rows: list[dict[str, Any]], extra: dict[str, Any]
) -> None:
    plain = sum(row["plain_tokens_per_s"] for row in rows) / len(rows)
    content = {"plain": {"tokens_per_s": plain}, "snapshots": rows} | extra | {"run": str(plan.out)}
    report.save(content, out / "report.json")
    (out / "report.png").write_bytes((plan.out / "report.png").read_bytes())
    console.print(report.table(rows))
    console.print(
        f"{extra['identical_texts']} of {extra['compared_texts']} texts are those of plain decoding, to the last bit\n"
        f"report: {out / 'report.json'}, picture: {out / 'report.png'}, {extra['seconds']} s\n"
        f"see the drafter's history: .venv/bin/mlflow ui --backend-store-uri {settings.registry.url}"
    )


def _write_config(plan: DemoPlan, log: str | None, target: str | None, drafter: str | None) -> Path:
    """Write the run's own settings: a fresh log, registry and port, and snapshots as often as the plan says."""
    defaults = config.Settings()
    num_learned = (len(_recorded(plan)) + plan.num_live) * (HELD_OUT_EVERY - 2) // HELD_OUT_EVERY
    steps = max(1, num_learned // defaults.learner.records_per_step // plan.num_snapshots)
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
        f'url = "sqlite:///{plan.out}/mlflow.db"',
        "[learner]",
        f"steps_per_snapshot = {steps}",
        f"threads = {os.cpu_count() or 1}",
        f"held_out_every = {HELD_OUT_EVERY}",
        "[worker]",
        f"port = {free_port()}",
    ]
    path = plan.out / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _recorded(plan: DemoPlan) -> list[TraceRecord]:
    return list(islice(archive.read(RECORDED), plan.num_recorded))


@contextmanager
def _spinner(title: str) -> Iterator[None]:
    started = time.monotonic()
    with console.status(title, refresh_per_second=REFRESH_PER_S):
        yield
    console.print(f"{title}: {time.monotonic() - started:.0f} s")


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=REFRESH_PER_S) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


if __name__ == "__main__":
    process.entry("demo", main)
