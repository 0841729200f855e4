"""The soak as a page: what is promised, how it was tried, what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.soak_parts import pictures

HOW = {
    "kills": (
        "Everybody is killed, over and over",
        "A Kafka broker (KRaft, one node), an MLflow server on SQLite, the controller, the distiller with its Ray actor, "
        "and a decoding worker run as processes of their own around two tiny random models. Clients ask without end, half "
        "of them streamed, at temperature 0. At random moments somebody gets SIGKILL: the worker, the broker, the "
        "registry, the learning process or the one that started it. A supervisor (the soak) starts again what ended; Ray "
        "restarts its actor. Then the clients stop and the records are accounted for:\n\n"
        "- *lost*: a request whose record the worker had counted as acknowledged is not in the log, or the log holds a "
        "record that snapshots passed over (`omnidraft traces verify`). A request is known to be acknowledged when a look "
        "at the worker's counters after its answer found as many records acknowledged as emitted.\n"
        "- *learned twice*: snapshots count more learned records than the log has distinct ones.\n"
        "- *corrupt*: an answer is not plain decoding's text, which was computed before, or comes from a snapshot that the "
        "registry does not hold whole. The beginnings of streams that broke off are checked too.\n"
        "- *failed*: a request without an answer. Clients ask again when the connection breaks or the worker is busy.\n"
        "- *final weights*: the log is learned once more from its beginning in one process that nobody kills. Weights, "
        "n-gram cache, optimizer and memory must be the same to the bit. For this the trace topic has one partition: "
        "batches are then a function of the log alone. With several, whose turn it is while one of them is idle depends "
        "on time, so bit equality needs one partition or partitions that never run dry; exactly once does not.",
    ),
    "broker-down": (
        "The broker is away",
        "One worker's engine decodes the same prompts in turns with the broker up, stopped (SIGSTOP), and killed. The ratio "
        "is the median over prompts of the speed in such a window to the speed with the broker up. The queue of records "
        "is made so small that it overflows.",
    ),
    "registry-down": (
        "The registry is away",
        "Clients ask while the MLflow server is killed, stays down, and is started again.",
    ),
    "fuzz": (
        "Hostile records",
        "Recorded records, cut, mutated, mislabelled, replaced by noise or by two megabytes of zeros, through the learner's "
        "source over a log; every one must have exactly one fate.",
    ),
    "throughput": (
        "Records a second",
        "One writer process and one reader process around one topic with one partition, as a worker and a learner use them "
        "(idempotent, acks=all, 128 records a batch, each acknowledged before the next), contents cut from recorded "
        "traffic.",
    ),
}
"""Part -> title and method."""

HIDDEN = ("kills_at_s", "answers_per_10s", "peaks_rss_mib", "written_by_second", "read_by_second", "windows")
"""Figures that are pictures."""


def write(report: Mapping[str, Any], path: Path) -> None:
    """The page, and its pictures beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = pictures.draw(report["parts"], path.parent, path.stem)
    path.write_text("\n".join(_lines(report, drawn)) + "\n")


def _lines(report: Mapping[str, Any], drawn: Mapping[str, str]) -> Iterator[str]:
    yield "# Reliability\n"
    yield "Written by `make soak` (`python -m pipelines.soak --help`). Nothing here is typed by hand.\n"
    yield "| part | promise | held |"
    yield "|---|---|---|"
    for name, told in report["parts"].items():
        for promise, held in told["promises"].items():
            yield f"| {name} | {promise} | {'yes' if held else '**no**'} |"
    yield ""
    for name, told in report["parts"].items():
        yield from _part(name, told, drawn.get(name))


def _part(name: str, told: Mapping[str, Any], picture: str | None) -> Iterator[str]:
    title, how = HOW[name]
    yield f"## {title}\n"
    yield f"{how}\n"
    if picture is not None:
        yield f"![{title}]({picture})\n"
    yield "| figure | value |"
    yield "|---|---|"
    for figure, value in _flat(told["figures"]):
        yield f"| {figure} | {value} |"
    machine = told["machine"]
    yield (
        f"\n`{told['command']}`, {told['seconds']:.0f} s, {machine['cores']} cores of {machine['processor']}, "
        f"commit {machine['commit']}.\n"
    )


def _flat(figures: Mapping[str, Any], before: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Names with their groups before them; words instead of underscores."""
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
