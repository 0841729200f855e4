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
decoding worker run as separate processes with two tiny random models. Clients send requests with a short pause after
each answer, half of them streamed, at temperature 0. At random moments one process gets SIGKILL: the worker, the
broker, the registry, the learning process, or the one that started it. Most kills come when all processes are up again,
others while one is still down. The soak restarts processes that ended; Ray restarts its actor. Then the clients stop
and every record is accounted for:

- *acknowledged lost*: a request whose record the worker had counted as acknowledged is not in the log, or the snapshots
  missed a record that the log holds (`omnidraft traces verify`). A request counts as acknowledged when the worker's
  counters, read after its answer, show as many records acknowledged as emitted.
- *learned twice*: the snapshots count more learned records than the log has distinct ones.
- *corrupt served*: an answer differs from plain decoding's text, which was computed before, or comes from a snapshot
  that the registry does not hold completely. The received part of a broken stream is checked too.
- *requests failed*: a request never got an answer. Clients repeat a request when the connection breaks or the worker is
  busy.
- *weights equal*: one process that is never killed learns the same log again from its beginning. Weights, n-gram cache,
  optimizer and the batcher's state must be identical to the bit. For this the trace topic has one partition, so that
  the batches depend on the log alone. With several, the order of partitions while one is idle depends on time; that no
  record is lost or learned twice does not."""

BROKER_DOWN = """\
One engine with one recorder decodes the same prompts, in turn with the broker up, stopped (SIGSTOP) and killed. The
ratio is the speed in such a window divided by the speed with the broker up, as the median over prompts. The queue of
records is so small that it overflows."""

REGISTRY_DOWN = "Clients send requests while the MLflow server is killed, stays down, and is started again."

ROLLBACK = """\
Three workers follow one control log and hold both snapshots in memory. The time is measured from the command, which
moves the alias and announces it, until each worker answers a request with the previous snapshot; several times in a
row."""

FUZZ = """\
The learner's consumer reads recorded trace records from a log that were cut, mutated, mislabelled, or replaced by
noise or by two megabytes of zeros. Each of them must be counted under exactly one outcome."""

THROUGHPUT = """\
One process writes to a topic with one partition and another reads it, with the settings of a worker and a learner:
idempotent, all replicas acknowledge, 128 records a batch, each batch acknowledged before the next. The contents are cut
from recorded traffic."""

DRIFT = """\
The whole fleet runs with real models. Traffic changes from one task to another while the drafter learns. Agreement is
that of the first candidate after the text, as the controller sees it. A fall counts as told when its announcement is on
the control log. *Resampled*: the detector runs with its default settings over requests that are drawn repeatedly from
the last ones before the change (false alarms), and from these and then the first ones after it (delay)."""

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
