"""The soak as a page: assertions, methods and figures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.soak import pictures

HIDDEN = (
    *("kills_at_s", "answers_per_10s", "peaks_rss_mib", "written_by_second", "read_by_second", "windows"),
    *("agreements", "changed_at"),
)
"""Figures that the pictures show."""

KILLS = """\
A Kafka broker (KRaft, one node), an MLflow server on SQLite, the controller, the distiller with its Ray actor, and a
decoding worker run as processes of their own around two tiny random models. Clients ask without end, half of them
streamed, at temperature 0. At random moments somebody gets SIGKILL: the worker, the broker, the registry, the learning
process, or the one that started it; most when everybody is back, others while somebody is still away. A supervisor
(the soak) starts again what ended; Ray restarts its actor. Then the clients stop and everything is accounted for:

- *acknowledged lost*: a request whose record the worker had counted as acknowledged is not in the log, or snapshots
  passed over a record that the log holds (`omnidraft traces verify`). A request is known to be acknowledged when a look
  at the worker's counters after its answer found as many records acknowledged as emitted.
- *learned twice*: snapshots count more learned records than the log has distinct ones.
- *corrupt served*: an answer that is not plain decoding's text, which was computed before, or that comes from a
  snapshot which the registry does not hold whole. Beginnings of streams that broke off are checked too.
- *requests failed*: a request without an answer in the end. Clients ask again when the connection breaks or the worker
  is busy.
- *weights equal*: the log is learned once more from its beginning, in one process that nobody kills. Weights, n-gram
  cache, optimizer and memory must be the same to the bit. For this the trace topic has one partition: batches are then
  a function of the log alone. With several, whose turn it is while one of them is idle depends on time; that each
  record is learned once does not."""

BROKER_DOWN = """\
One worker's engine decodes the same prompts in turns with the broker up, stopped (SIGSTOP) and killed, one engine and
one recorder throughout. The ratio is the median over prompts of the speed in such a window to that with the broker up.
The queue of records is made so small that it overflows."""

REGISTRY_DOWN = "Clients ask while the MLflow server is killed, stays down, and is started again."

ROLLBACK = """\
Three workers over one control log, both snapshots in the memory of each. From the command (alias moved, announced)
until a request to each worker is answered by the snapshot before, several times in a row."""

FUZZ = """\
Recorded records cut, mutated, mislabelled, replaced by noise or by two megabytes of zeros, through the learner's source
over a log. Every one must have exactly one fate."""

THROUGHPUT = """\
One writer process and one reader process around one topic with one partition, as a worker and a learner use them:
idempotent, all replicas acknowledge, 128 records a batch, each batch acknowledged before the next. Contents are cut
from recorded traffic."""

DRIFT = """\
Real models, the whole fleet, traffic of one task and then of another, while the drafter learns. Agreement is that of
the first candidate behind the text, as the controller sees it; a fall is told when its announcement is on the control
log. *Resampled*: the detector with its default settings over requests drawn again and again from the last ones before
the change (false alarms), and from these and then the first ones after it (delay)."""

METHODS = {
    "kills": ("Everybody is killed, over and over", KILLS),
    "broker-down": ("The broker is away", BROKER_DOWN),
    "registry-down": ("The registry is away", REGISTRY_DOWN),
    "rollback": ("A rollback", ROLLBACK),
    "fuzz": ("Hostile records", FUZZ),
    "throughput": ("Records a second", THROUGHPUT),
    "drift": ("Traffic changes its task", DRIFT),
}
"""Part -> its title and a description of its method."""


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write the page, and its pictures beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture_names = pictures.draw(report["parts"], path.parent, path.stem)
    path.write_text("\n".join(_lines(report, picture_names)) + "\n")


def _lines(report: Mapping[str, Any], picture_names: Mapping[str, str]) -> Iterator[str]:
    yield "# Reliability\n"
    yield "Written by `make soak` (`python -m pipelines.soak --help`). Nothing here is typed by hand.\n"
    yield "| part | promise | held |"
    yield "|---|---|---|"
    for name, part in report["parts"].items():
        for assertion, held in part["promises"].items():
            yield f"| {name} | {assertion} | {'yes' if held else '**no**'} |"
    yield ""
    for name, part in report["parts"].items():
        yield from _part(name, part, picture_names.get(name))


def _part(name: str, part: Mapping[str, Any], picture: str | None) -> Iterator[str]:
    title, how = METHODS[name]
    yield f"## {title}\n"
    yield f"{how}\n"
    if picture is not None:
        yield f"![{title}]({picture})\n"
    yield "| figure | value |"
    yield "|---|---|"
    for figure, value in _flat(part["figures"]):
        yield f"| {figure} | {value} |"
    machine = part["machine"]
    yield (
        f"\n`{part['command']}`, {part['seconds']:.0f} s, {machine['cores']} cores of {machine['processor']}, "
        f"commit {machine['commit']}.\n"
    )


def _flat(figures: Mapping[str, Any], before: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield names and values; a name has its groups before it, and spaces instead of underscores."""
    for name, value in figures.items():
        names = (*before, name.replace("_", " "))
        if name in HIDDEN or value in ([], {}):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, names)
        elif isinstance(value, list):
            yield ": ".join(names), ", ".join(map(str, value))
        else:
            yield (
                ": ".join(names),
                f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value),
            )
