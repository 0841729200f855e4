"""What a fleet of so many workers writes, learns and downloads: arithmetic, and a simulation beside it.

`python -m pipelines.scaling` prints the table of docs/scaling.md; `--markdown docs/scaling.md` puts it there.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from omnidraft.errors import ConfigError
from omnidraft.hosts.process import entry
from pipelines.scaling_parts import simulation
from pipelines.scaling_parts.arithmetic import Fleet
from pipelines.scaling_parts.measured import Measured, recorded_traffic

SIZES = "10,1000,100000"
BEGIN, END = "<!-- pipelines.scaling begins -->", "<!-- pipelines.scaling ends -->"
HOURS = 240.0
"""That the learner is simulated for."""


def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = SIZES,
    worker_tokens_per_s: Annotated[float | None, typer.Option(help="Of one worker, always busy.")] = None,
    learner_tokens_per_s: Annotated[float | None, typer.Option(help="That one learner learns.")] = None,
    simulate: Annotated[bool, typer.Option(help="Play it through as well.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="A file whose marked part the table replaces.")] = None,
) -> None:
    """Tell what they need."""
    measured = Measured(recorded_traffic())
    measured = replace(
        measured,
        worker_tokens_per_s=worker_tokens_per_s or measured.worker_tokens_per_s,
        learner_tokens_per_s=learner_tokens_per_s or measured.learner_tokens_per_s,
    )
    fleets = [Fleet(int(number), measured) for number in workers.split(",")]
    told = table(fleets)
    if simulate:
        told += "\n" + simulated(fleets)
    if markdown is not None:
        put(markdown, told)
    typer.echo(told)


def table(fleets: Sequence[Fleet]) -> str:
    """Rows of figures, a column for each fleet."""
    rows = [_row("workers", [f"{each.num_workers:,}" for each in fleets]), _row("---", ["---:"] * len(fleets))]
    rows += [_row(name, [cell(each) for each in fleets]) for name, cell in FIGURES.items()]
    return "\n".join(rows) + "\n"


def simulated(fleets: Sequence[Fleet], seed: int = 0) -> str:
    """The figures that events give, under the same names."""
    rng = np.random.default_rng(seed)
    rows = [_row("simulated", [f"{each.num_workers:,}" for each in fleets]), _row("---", ["---:"] * len(fleets))]
    traces = [simulation.traces(each.num_workers, each.measured, each.partitions, rng) for each in fleets]
    learned = [simulation.learner(each.records_per_s, each.measured, HOURS, rng) for each in fleets]
    rows += [
        _row("trace records/s", [_number(each.records_per_s) for each in traces]),
        _row("into Kafka", [f"{_bytes(each.bytes_per_s)}/s" for each in traces]),
        _row("busiest partition, records/s", [_number(each.busiest_partition_records_per_s) for each in traces]),
        _row("share of tokens learned", [_share(each.share) for each in learned]),
        _row("age of a record when it is learned", [_time(each.mean_age_s) for each in learned]),
    ]
    for name, size in (("all weights", "full_bytes"), ("LoRA", "lora_bytes")):
        seconds = (simulation.fanout_s(each.num_workers, getattr(each, size), each.measured, rng) for each in fleets)
        rows.append(_row(f"one server hands out {name} in", [_time(each) for each in seconds]))
    return "\n".join(rows) + "\n"


def put(path: Path, told: str) -> None:
    """Replace what stands between the marks. Raises ConfigError when they are not there."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"{path} has no part between {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{told}\n{END}{rest.split(END)[1]}")


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _time(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def _share(value: float) -> str:
    return f"{value:.2%}" if value >= 0.001 else f"{value:.4%}"


FIGURES = {
    "tokens/s": lambda fleet: _number(fleet.tokens_per_s),
    "trace records/s": lambda fleet: _number(fleet.records_per_s),
    "into Kafka": lambda fleet: f"{_bytes(fleet.log_bytes_per_s)}/s",
    "on brokers' disks, 72 h, 3 replicas": lambda fleet: _bytes(fleet.log_bytes_kept),
    "partitions, half full": lambda fleet: _number(fleet.partitions).removesuffix(".00"),
    "share of tokens that one learner learns": lambda fleet: _share(fleet.learned_share),
    "age of a record when it is learned, by default": lambda fleet: (
        _time(fleet.learner_age_s) if fleet.learned_share < 1 else "seconds"
    ),
    "workers that need to record": lambda fleet: f"{fleet.num_recorders:,}",
    "into Kafka from those": lambda fleet: (
        f"{_bytes(fleet.log_bytes_per_s * fleet.num_recorders / fleet.num_workers)}/s"
    ),
    "a snapshot every, by default": lambda fleet: _time(fleet.snapshot_interval_s),
    "an announcement to all": lambda fleet: _bytes(fleet.announcement_bytes),
    "fetches/s of idle followers": lambda fleet: _number(fleet.control_fetches_per_s),
    "one server hands out all weights in": lambda fleet: _time(fleet.fanout_s(fleet.full_bytes)),
    "one server hands out LoRA in": lambda fleet: _time(fleet.fanout_s(fleet.lora_bytes)),
    "`learner.steps_per_snapshot`, all weights": lambda fleet: f"{fleet.least_steps(fleet.full_bytes):,}",
    "`learner.steps_per_snapshot`, LoRA": lambda fleet: f"{fleet.least_steps(fleet.lora_bytes):,}",
    "questions/s to the registry, by default": lambda fleet: _number(fleet.registry_questions_per_s),
    "`worker.poll_s`": lambda fleet: _time(fleet.least_poll_s),
}
"""Name -> cell."""


if __name__ == "__main__":
    entry("pipelines.scaling", main)
