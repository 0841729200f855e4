"""Agreement of a snapshot on a slice of a log, offline: no target is run, nothing is written but the report.

`python -m pipelines.evaluate --log URL --snapshot base champion runs/mine --json OUT`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, wiring
from omnidraft.distill.evaluation import speedup_model
from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.training.learner import Learner
from omnidraft.hosts import process
from omnidraft.progress import bar
from omnidraft.traces.record import TraceRecord
from omnidraft.wiring.named_snapshots import named_folder
from pipelines.lib import log_slice, report
from pipelines.lib.learning import measure

BASE = "base"


def main(
    log: Annotated[str, typer.Option(help="sqlite:///path, kafka://host:port, or a trace archive.")],
    names: Annotated[
        list[str] | None, typer.Option("--snapshot", help="base, a folder, a version or an alias; more may follow.")
    ] = None,
    more_names: Annotated[list[str] | None, typer.Argument(help="More snapshots.", metavar="[SNAPSHOT]...")] = None,
    from_time: Annotated[str | None, typer.Option("--from", help="ISO time (UTC) or Unix milliseconds.")] = None,
    to_time: Annotated[str | None, typer.Option("--to", help="Records that ended before this time.")] = None,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help=f"name=value,...; names: {', '.join(log_slice.FILTERS)}")
    ] = None,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Measure snapshots on recorded traffic."""
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    tokenizers = wiring.vocabularies(settings)
    slice_filter = log_slice.parse_filter(from_time, to_time, filters or [])
    log_records = log_slice.read(
        log, settings, slice_filter.of_pair(settings), alignment=tokenizers.alignment.fingerprint
    )
    records = log_records.require()
    snapshot_names = [*(names or []), *(more_names or [])] or [BASE]
    costs = speedup_model.fit(records)
    rows = {}
    with bar("evaluating", len(snapshot_names)) as advance:
        for name in snapshot_names:
            learner = _loaded(name, settings, tokenizers)
            rows[name] = _row(learner, records, costs)
            advance()
    content = {"log": log, "records": len(records), "passed_over": dict(log_records.skipped), "snapshots": rows}
    if json_path is not None:
        report.save(content, json_path)
    Console().print(_table(rows))


def _loaded(name: str, settings: config.Settings, tokenizers: wiring.Vocabularies) -> Learner:
    """Return a learner with the snapshot's weights and cache. Raises SnapshotError when the name is unknown."""
    if name == BASE:
        return wiring.learner(settings, tokenizers)
    with named_folder(settings, name) as (version, folder):
        return wiring.learner_from_snapshot(settings, tokenizers, version.manifest, folder)


def _row(learner: Learner, records: list[TraceRecord], costs: speedup_model.SpeedupModel | None) -> dict[str, Any]:
    point = measure(learner, records)
    tenants = sorted({record.tenant for record in records})
    return {
        "agreement": point.agreement,
        "tokens_per_pass": point.tokens_per_pass,
        "predicted_speedup": None if costs is None else costs.speedup(point.tokens_per_pass),
        "ngrams": len(learner.cache),
        "agreement_by_tenant": {
            tenant: share(learner.hits([each for each in records if each.tenant == tenant], with_cache=True))
            for tenant in tenants
        },
    }


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    depths = next(iter(rows.values()))["tokens_per_pass"]
    table = Table("snapshot", "agreement", *(f"chain of {depth}" for depth in depths), "predicted speed-up")
    for name, row in rows.items():
        speedup = row["predicted_speedup"]
        cells = [f"{each:.2f}" for each in row["tokens_per_pass"].values()]
        table.add_row(name, f"{row['agreement']:.3f}", *cells, "-" if speedup is None else f"{speedup:.2f}x")
    return table


if __name__ == "__main__":
    process.entry("evaluate", main)
