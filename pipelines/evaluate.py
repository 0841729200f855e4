"""Agreement of a snapshot on a slice of a log, offline: no target is run, nothing is written but the report.

`python -m pipelines.evaluate --log URL --snapshot base champion runs/mine --json OUT`. A snapshot agrees better with
records that it learned than with others: a warning says how many there are, and `--held-out` scores none of them.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from omnidraft import assembly, config
from omnidraft.assembly.registries import named_folder
from omnidraft.distill.evaluation import speedup_model
from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.ingest.record_disposition import is_held_out, record_key
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import RequestError
from omnidraft.files import require_writable_file, save_json
from omnidraft.hosts import process
from omnidraft.progress import bar
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces.record import TraceRecord
from pipelines.lib import log_slice
from pipelines.lib.learning import LearningPoint, measure

BASE = "base"


def main(
    log: log_slice.Log,
    names: Annotated[
        list[str] | None, typer.Option("--snapshot", help="base, a folder, a version or an alias; more may follow.")
    ] = None,
    more_names: Annotated[list[str] | None, typer.Argument(help="More snapshots.", metavar="[SNAPSHOT]...")] = None,
    from_time: log_slice.FromTime = None,
    to_time: log_slice.ToTime = None,
    filters: log_slice.Filters = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Score only those that the service holds out: learner.held_out_every.")
    ] = False,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Measure snapshots on recorded traffic."""
    require_writable_file(json_path)
    log_url = log if "://" in log else None
    settings = config.load(config_path, models={"target": target, "drafter": drafter}, log={"url": log_url})
    tokenizers = assembly.vocabularies(settings)
    slice_filter = log_slice.parse_filter(from_time, to_time, filters or [])
    log_records = log_slice.of_pair(log, settings, tokenizers, slice_filter)
    records = log_records.require()
    costs = speedup_model.fit(records)
    if held_out:
        records = _require_held_out(records, settings.learner.held_out_every)
    learned = LearnedRecords(log_records, records, settings.learner.held_out_every)
    snapshot_names = [*(names or []), *(more_names or [])] or [BASE]
    rows: dict[str, dict[str, Any]] = {}
    first_hits: Sequence[np.ndarray] = ()
    with bar("evaluating", len(snapshot_names)) as advance:
        for name in snapshot_names:
            learner, manifest = _loaded(name, settings, tokenizers)
            hits = learner.hits(records, with_cache=True)
            first_hits = first_hits or hits
            row = _row(measure(learner, records, hits, first_hits), records, hits, costs)
            rows[name] = row | {"ngrams": len(learner.cache), "learned_records": learned.count(manifest)}
            advance()
    content = {"log": log, "records": len(records), "passed_over": dict(log_records.skipped), "snapshots": rows}
    Console().print(_table(rows))
    for name, row in rows.items():
        _warn(name, row["learned_records"], len(records))
    if json_path is not None:
        save_json(content | {"held_out_only": held_out}, json_path)


class LearnedRecords:
    """Counts those of the scored records that a snapshot learned."""

    def __init__(self, log_records: log_slice.Slice, scored: Sequence[TraceRecord], held_out_every: int) -> None:
        """
        Args:
            scored: some of the log's records.
            held_out_every: that of snapshots which do not tell theirs.
        """
        self._log_id, self._scored, self._held_out_every = log_records.log_id, scored, held_out_every
        copies = zip(map(record_key, log_records.records), log_records.positions, strict=True)
        self._positions = dict(reversed(list(copies)))
        """That of each record's first copy, by its key."""

    def count(self, manifest: Manifest | None) -> int | None:
        """Return how many records lie before the snapshot's offsets and were not held out from it. Those that its
        learner skipped are among them. None: that cannot be told.

        Args:
            manifest: None for the base drafter.
        """
        if manifest is None or not manifest.num_records:
            return 0
        every = int(manifest.settings.get("held_out_every", self._held_out_every))
        learnable = [record_key(each) for each in self._scored if not is_held_out(each, every)]
        if not manifest.offsets:
            return None
        if not learnable:
            return 0
        if self._log_id is None or manifest.log_id not in (None, self._log_id):
            return None
        positions = (self._positions[key] for key in learnable)
        return sum(offset < manifest.offsets.get(partition, 0) for partition, offset in positions)


def _require_held_out(records: Sequence[TraceRecord], every: int) -> list[TraceRecord]:
    """Return the records that the service holds out. Raises RequestError when there are none."""
    chosen = [each for each in records if is_held_out(each, every)]
    if not chosen:
        raise RequestError(f"none of {len(records)} records is held out, with learner.held_out_every = {every}")
    return chosen


def _warn(name: str, num_learned: int | None, num_records: int) -> None:
    """Say on stderr what the snapshot learned of the records that it was scored on."""
    if num_learned is None:
        print(f"{name}: cannot tell what it learned of these {num_records} records", file=sys.stderr)
    elif num_learned:
        print(
            f"{name} has learned up to {num_learned} of these {num_records} records, which flatters it; --held-out, "
            "with the service's learner.held_out_every, scores none of them",
            file=sys.stderr,
        )


def _loaded(name: str, settings: config.Settings, tokenizers: assembly.Vocabularies) -> tuple[Learner, Manifest | None]:
    """Return a learner with the snapshot's weights and cache, and its manifest. Raises SnapshotError when the name is
    unknown."""
    if name == BASE:
        return assembly.learner(settings, tokenizers), None
    with named_folder(settings, name) as (version, folder):
        return assembly.learner_from_snapshot(settings, tokenizers, version.manifest, folder), version.manifest


def _row(
    point: LearningPoint,
    records: Sequence[TraceRecord],
    hits: Sequence[np.ndarray],
    costs: speedup_model.SpeedupModel | None,
) -> dict[str, Any]:
    of_tenant = defaultdict[str, list[np.ndarray]](list)
    for record, hits_P in zip(records, hits, strict=True):
        of_tenant[record.tenant].append(hits_P)
    return {
        "agreement": point.agreement,
        "gain": point.gain,
        "gain_error": point.gain_error,
        "tokens_per_pass": point.tokens_per_pass,
        "predicted_speedup": None if costs is None else costs.speedup(point.tokens_per_pass),
        "agreement_by_tenant": {tenant: share(of_tenant[tenant]) for tenant in sorted(of_tenant)},
    }


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    depths = next(iter(rows.values()))["tokens_per_pass"]
    headings = ("snapshot", "agreement", "over the first, and standard error")
    table = Table(*headings, *(f"chain of {depth}" for depth in depths), "predicted speed-up")
    for name, row in rows.items():
        speedup = row["predicted_speedup"]
        cells = [f"{each:.2f}" for each in row["tokens_per_pass"].values()]
        gain = f"{row['gain']:+.3f} +- {row['gain_error']:.3f}"
        table.add_row(name, f"{row['agreement']:.3f}", gain, *cells, "-" if speedup is None else f"{speedup:.2f}x")
    return table


if __name__ == "__main__":
    process.entry("evaluate", main)
