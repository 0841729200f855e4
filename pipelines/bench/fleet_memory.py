"""Costs of the fleet's memory: its bytes, the way of a snapshot from the learner to a worker, and a look into it.

`python -m pipelines.bench.fleet_memory --json OUT`. The texts are pieces of the demo's recorded answers with some ids
changed, so they repeat each other as answers do; nothing is downloaded.

built      from texts to files, of all tenants
published  the snapshot written, and put into a registry of folders
swapped    fetched from there and loaded by a worker
lookup     the longest end of a text found in one tenant's memory
rebuilt    the same bytes from a process that began anew after one was killed half way
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from omnidraft.files import save_json, sha256_of
from omnidraft.hosts import process
from omnidraft.snapshots.bundle import MEMORY
from pipelines.lib import machine

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    import numpy as np

    from omnidraft.decode.drafting.suffix_source import FleetMemory
    from omnidraft.distill.memory.memory_files import MemoryFiles
    from omnidraft.memory.recent_texts import MemoryText
    from omnidraft.ports import SnapshotVersion

_TEXT_IDS = 200
_CHANGED = 0.05
"""Share of ids in a text that the recorded answers do not have there."""
_NUM_LOOKUPS = 2000
_VOCABULARY_SIZE = 151_936
"""Qwen2.5's, whose answers these are."""

Result = TypeVar("Result")


def main(
    tokens: Annotated[int, typer.Option(min=1000, help="In all memories together.")] = 10_000_000,
    tenants: Annotated[int, typer.Option(min=1, help="They have equally many tokens.")] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Measure one memory, and print the figures."""
    import json

    if tokens < tenants * _TEXT_IDS:
        raise typer.BadParameter(f"--tokens: {tenants} tenants need {tenants * _TEXT_IDS:,}, {_TEXT_IDS} each")
    with tempfile.TemporaryDirectory(prefix="omnidraft-memory-") as folder:
        figures = _measure(tokens, tenants, Path(folder))
    about = machine.made_by("pipelines.bench.fleet_memory")
    figures = about | {"tokens": tokens, "tenants": tenants} | figures
    typer.echo(json.dumps(figures, indent=2))
    if json_path is not None:
        save_json(figures, json_path)


def _measure(tokens: int, tenants: int, folder: Path) -> dict[str, Any]:
    files = _memory(tokens, tenants, folder / "staging")
    paths, built_s = _timed(files.stage)
    memory, seconds = _to_worker(paths, folder)
    return {
        "bytes": sum(path.stat().st_size for path in paths.values()),
        "built_ms": round(1000 * built_s, 3),
        **{f"{name}_ms": round(1000 * each, 3) for name, each in seconds.items()},
        **_lookups(memory, tenants),
        "rebuilt": _rebuilt_after_kill(tokens, tenants, folder / "killed", built_s) == _checksums(paths),
    }


def _memory(tokens: int, tenants: int, folder: Path) -> "MemoryFiles":
    """Return a learner's memory, none of whose files is written yet."""
    from omnidraft.config import MemorySettings
    from omnidraft.distill.memory.memory_files import MemoryFiles
    from omnidraft.distill.memory.text_memory import TextMemory
    from omnidraft.memory.memory_file import Owner
    from omnidraft.telemetry.metrics import CountingMetrics

    settings = MemorySettings(tokens_per_tenant=tokens, total_tokens=tokens, max_tenants=tenants)
    memory = TextMemory(settings, vocabulary_size=_VOCABULARY_SIZE)
    owners = [Owner("tenant", str(number)) for number in range(tenants)]
    memory.restore({owner: _texts(owner.name, tokens // tenants) for owner in owners})
    for owner in owners:
        memory.mark_changed(owner)
    return MemoryFiles(memory, folder, CountingMetrics())


def _texts(tenant: str, tokens: int) -> "list[MemoryText]":
    """Return the same texts for the same tenant."""
    from omnidraft.memory.recent_texts import MemoryText

    rows = _pieces(int(tenant), tokens // _TEXT_IDS)
    return [MemoryText(tenant, number, 0, number, 0, row) for number, row in enumerate(rows)]


def _pieces(seed: int, number: int) -> "np.ndarray":
    """Return pieces of recorded answers, shape [number, _TEXT_IDS], uint32, with some ids changed."""
    import numpy as np

    from omnidraft.demo.answers import recorded

    answers = np.concatenate([record.emitted_ids for part in recorded(1000) for record in part]).astype(np.uint32)
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(answers) - _TEXT_IDS, number)
    ids = answers[starts[:, None] + np.arange(_TEXT_IDS)]
    changed: np.ndarray = np.where(random.random(ids.shape) < _CHANGED, random.choice(answers, ids.shape), ids)
    return changed


def _to_worker(paths: Mapping[str, Path], folder: Path) -> "tuple[FleetMemory, dict[str, float]]":
    """Return the memory that a worker loads from a snapshot with these files, and the seconds of the two ways there."""
    from omnidraft.decode.snapshot.fleet_memory import MemoryLoader
    from omnidraft.memory.memory_file import Owners
    from omnidraft.registry.directory_registry import DirectoryRegistry
    from omnidraft.snapshots import bundle
    from omnidraft.snapshots.manifest import Manifest
    from omnidraft.telemetry.metrics import CountingMetrics

    pair = {"drafter": "drafter", "target": "target"}
    manifest = Manifest(snapshot_id="s1", drafter_hash="none", alignment="none", created_ms=1, **pair)
    registry = DirectoryRegistry(folder / "registry", pair["drafter"], pair["target"], keep_resume=1)
    loader = MemoryLoader(Owners({}), CountingMetrics(), target=pair["target"])

    def publish() -> "SnapshotVersion":
        bundle.write(folder / "bundle", manifest, paths)
        return registry.publish(folder / "bundle", None)

    version, published_s = _timed(publish)
    memory, swapped_s = _timed(
        lambda: loader.load(version, registry.fetch(version.version, folder / "worker", ("memory",)))
    )
    return memory, {"published": published_s, "swapped": swapped_s}


def _lookups(memory: "FleetMemory", tenants: int) -> dict[str, float]:
    """Return the times of looking for ends of new texts, each in the memory of the next tenant."""
    indexes = [memory(str(tenant)) for tenant in range(tenants)]
    seconds, lengths = [], []
    for number, row in enumerate(_pieces(tenants, _NUM_LOOKUPS).tolist()):
        index = indexes[number % tenants]
        assert index is not None, "every tenant has texts"
        match, took_s = _timed(partial(index.longest_match, row))
        seconds.append(took_s)
        lengths.append(match.length if match else 0)
    return {
        "lookup_us": round(1e6 * statistics.median(seconds), 1),
        "lookup_p99_us": round(1e6 * statistics.quantiles(seconds, n=100)[-1], 1),
        "median_match": statistics.median(lengths),
    }


def _rebuilt_after_kill(tokens: int, tenants: int, folder: Path, built_s: float) -> dict[str, str]:
    """Return the checksums of the files of a process that took the place of a killed one."""
    first = _start(tokens, tenants, folder)
    while first.is_alive() and not folder.exists():
        time.sleep(0.01)
    time.sleep(built_s / 2)
    first.kill()
    first.join()
    _start(tokens, tenants, folder).join()
    return _checksums({MEMORY + path.name: path for path in folder.iterdir() if not path.name.startswith(".")})


def _start(tokens: int, tenants: int, folder: Path) -> "SpawnProcess":
    started = multiprocessing.get_context("spawn").Process(target=_stage, args=(tokens, tenants, folder))
    started.start()
    return started


def _stage(tokens: int, tenants: int, folder: Path) -> None:
    _memory(tokens, tenants, folder).stage()


def _checksums(paths: Mapping[str, Path]) -> dict[str, str]:
    return {name: sha256_of(path) for name, path in paths.items()}


def _timed(function: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


if __name__ == "__main__":
    process.entry("fleet_memory", main)
