"""The load of N workers on log, learner, registry and network: the table of docs/scaling.md, where the formulas stand.

`python -m pipelines.scaling` prints it; `--markdown docs/scaling.md` puts it into the page.
"""

from math import ceil
from pathlib import Path
from typing import Annotated

import typer

from omnidraft.config import Settings
from omnidraft.distill.ingest.batch_reader import KEPT_SHARE
from omnidraft.errors import ConfigError
from omnidraft.hosts.process import entry
from omnidraft.vocab.ngram_table import ENTRY
from pipelines.lib.choices import numbers

BEGIN, END = "<!-- pipelines.scaling begins -->", "<!-- pipelines.scaling ends -->"
WORKER_TOKENS_PER_S, LEARNER_TOKENS_PER_S = 15.3, 57.0
TOKENS_PER_RECORD, BYTES_PER_TOKEN = 12_593 / 73, 90.61725
PARTITION_RECORDS_PER_S, REGISTRY_REQUESTS_PER_S = 2034.6, 14.0
NUM_WEIGHTS, NUM_FACTORS_PER_RANK = 134_515_008, 305_280
SERVER_BYTES_PER_S, WORKER_BYTES_PER_S = 1.25e9, 125e6
RETENTION_S, REPLICAS, FETCH_WAIT_S, ANNOUNCEMENT_BYTES = 72 * 3600, 3, 0.5, 200
HEADROOM, RECORD_CHOICE, DOWNLOAD_SHARE = 2, 10, 0.1


def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "10,1000,100000",
    worker_tokens_per_s: Annotated[float, typer.Option(help="Emitted by one busy worker.")] = WORKER_TOKENS_PER_S,
    learner_tokens_per_s: Annotated[float, typer.Option(help="Learned by one learner.")] = LEARNER_TOKENS_PER_S,
    markdown: Annotated[Path | None, typer.Option(help="A page whose marked part the table replaces.")] = None,
) -> None:
    """Print a table of a fleet's traffic, a column for each number of workers."""
    columns = [column(num, worker_tokens_per_s, learner_tokens_per_s) for num in numbers(workers, "--workers")]
    lines = [f"| {name} | {' | '.join(each[name] for each in columns)} |" for name in columns[0]]
    lines.insert(1, f"| --- | {' | '.join(['---:'] * len(columns))} |")
    table = "\n".join(lines) + "\n"
    if markdown is not None:
        text = markdown.read_text()
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise ConfigError(f"{markdown} has no part between {BEGIN!r} and {END!r}")
        head, rest = text.split(BEGIN)
        markdown.write_text(f"{head}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}")
    typer.echo(table)


def column(num_workers: int, worker_tokens_per_s: float, learner_tokens_per_s: float) -> dict[str, str]:
    """Return the cells of one fleet by the names of their rows."""
    learner = Settings().learner
    tokens_per_s = num_workers * worker_tokens_per_s
    records_per_s, log_bytes_per_s = tokens_per_s / TOKENS_PER_RECORD, tokens_per_s * BYTES_PER_TOKEN
    num_recorders = min(num_workers, ceil(RECORD_CHOICE * learner_tokens_per_s / worker_tokens_per_s))
    step_s = learner.records_per_step * TOKENS_PER_RECORD / min(learner_tokens_per_s, tokens_per_s)
    share = min(1.0, learner_tokens_per_s / tokens_per_s)
    age_s = _mean_age_s(records_per_s, learner_tokens_per_s / TOKENS_PER_RECORD) if share < 1 else None
    return {
        "workers": f"{num_workers:,}",
        "tokens/s": _number(tokens_per_s),
        "trace records/s": _number(records_per_s),
        "into Kafka": f"{_bytes(log_bytes_per_s)}/s",
        "on brokers' disks, 72 h, 3 replicas": _bytes(log_bytes_per_s * RETENTION_S * REPLICAS),
        "partitions, half full": f"{ceil(HEADROOM * records_per_s / PARTITION_RECORDS_PER_S):,}",
        "share of tokens that one learner learns": f"{share:.2%}" if share >= 0.001 else f"{share:.4%}",
        "age of a record when it is learned, by default": "seconds" if age_s is None else _time(age_s),
        "workers that need to record": f"{num_recorders:,}",
        "into Kafka from those": f"{_bytes(log_bytes_per_s * num_recorders / num_workers)}/s",
        "a snapshot every, by default": _time(learner.steps_per_snapshot * step_s),
        "an announcement to all": _bytes(num_workers * ANNOUNCEMENT_BYTES),
    } | _downloads(num_workers, step_s)


def _mean_age_s(records_per_s: float, learned_per_s: float) -> float:
    """Return the mean age at which a learner that falls behind learns a record."""
    learner = Settings().learner
    fewest = KEPT_SHARE * learner.max_lag_records
    snapshot_s = learner.steps_per_snapshot * learner.records_per_step / learned_per_s
    most = max(learner.max_lag_records, fewest + (records_per_s - learned_per_s) * snapshot_s)
    return (fewest + most) / 2 / records_per_s


def _downloads(num_workers: int, step_s: float) -> dict[str, str]:
    settings = Settings()
    cache_bytes = settings.cache.capacity * ENTRY.itemsize
    sizes = {"all weights": 2 * NUM_WEIGHTS, "LoRA": 4 * settings.learner.lora_rank * NUM_FACTORS_PER_RANK}
    cells = {"fetches/s of idle followers": _number(num_workers / FETCH_WAIT_S)}
    seconds: dict[str, float] = {}
    for name, num_bytes in sizes.items():
        size = num_bytes + cache_bytes
        seconds[name] = max(num_workers * size / SERVER_BYTES_PER_S, size / WORKER_BYTES_PER_S)
        cells[f"one server hands out {name} in"] = _time(seconds[name])
    for name, download_s in seconds.items():
        least = max(settings.learner.steps_per_snapshot, ceil(download_s / DOWNLOAD_SHARE / step_s))
        cells[f"`learner.steps_per_snapshot`, {name}"] = f"{least:,}"
    poll_s = max(settings.worker.poll_s, HEADROOM * num_workers / REGISTRY_REQUESTS_PER_S)
    registry_requests_per_s = _number(num_workers / settings.worker.poll_s)
    return cells | {"requests/s to the registry, by default": registry_requests_per_s, "`worker.poll_s`": _time(poll_s)}


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB" if value < 1000 else f"{value:,.0f} TB"


def _time(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


if __name__ == "__main__":
    entry("pipelines.scaling", main)
