"""`omnidraft traces dead-letters`: list and show dead letters, and append them to their topic again."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config
from omnidraft.cli.options import Config, group, printable
from omnidraft.errors import RequestError

if TYPE_CHECKING:
    from omnidraft.distill.ingest.dead_letters import Choice, DeadLetter, Redriven
    from omnidraft.ports import LogReader

app = group("Messages that could not be learned from: list, show, redrive.")

Reasons = Annotated[list[str] | None, typer.Option("--reason", help="Dead letters with this reason; may be repeated.")]
HEX_BYTES = 256
SHOWN_CHARACTERS = 60


@app.command("list")
def list_dead_letters(
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many of the newest of each partition.")] = 20,
    reasons: Reasons = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    config_path: Config = None,
) -> None:
    """List dead letters, oldest first."""
    from omnidraft.distill.ingest import dead_letters
    from omnidraft.distill.ingest.topic_scan import idle_timeout_s
    from omnidraft.progress import bar

    settings = config.load(config_path)
    newest: dict[int, deque[dict[str, Any]]] = {}
    with (
        closing(_dead_letters(settings)) as reader,
        bar(f"reading {settings.log.dead_letters_topic}", _num_messages(reader), transient=True) as saw,
    ):
        letters = dead_letters.read(reader, idle_s=idle_timeout_s(settings.log.request_timeout_s))
        for dead_letter in _counted(letters, saw):
            if not reasons or dead_letter.reason in reasons:
                newest.setdefault(dead_letter.position[0], deque(maxlen=num)).append(_summary(dead_letter))
    rows = [row for partition in sorted(newest) for row in newest[partition]]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    Console(markup=False, highlight=False).print(_table(rows))


@app.command("show")
def show(
    partition: Annotated[int, typer.Argument(min=0)],
    offset: Annotated[int, typer.Argument(min=0)],
    config_path: Config = None,
) -> None:
    """Print one dead letter as JSON: its headers, its error, and its record as far as it is readable."""
    with closing(_dead_letters(config.load(config_path))) as reader:
        dead_letter = _find(reader, partition, offset)
    message, result = dead_letter.message, _summary(dead_letter)
    result |= {"key": _text(message.key), "timestamp_ms": message.timestamp_ms}
    result["headers"] = {name: _text(value) for name, value in dead_letter.original_headers.items()}
    print(json.dumps(result | _content(dead_letter), indent=2))


@app.command("redrive")
def redrive(
    reasons: Reasons = None,
    places: Annotated[
        list[str] | None, typer.Option("--offset", help="PARTITION:OFFSET of a dead letter; may be repeated.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also dead letters that were redriven before.")] = False,
    config_path: Config = None,
) -> None:
    """Append dead letters unchanged to the topic they came from, with a header that names the dead letter."""
    choice = _choice(reasons or [], places or [], everything)
    result = _redrive(config.load(config_path), choice, again)
    if missing := sorted(choice.positions - result.matched):
        raise RequestError(f"no dead letter at {missing[0][0]}:{missing[0][1]}")
    print(f"{result.num_redriven} redriven, {result.num_done_before} redriven before, {result.refused.total()} refused")
    for refusal, number in sorted(result.refused.items()):
        print(f"  refused {number}: {printable(refusal)}")


def _redrive(settings: "config.Settings", choice: "Choice", again: bool) -> "Redriven":
    from omnidraft import assembly
    from omnidraft.distill.ingest import dead_letters
    from omnidraft.distill.ingest.dead_letters import Redrive, redriven_before
    from omnidraft.distill.ingest.topic_scan import idle_timeout_s
    from omnidraft.progress import bar

    log, idle_s = settings.log, idle_timeout_s(settings.log.request_timeout_s)
    done: frozenset[str] = frozenset()
    if not again:
        with (
            closing(assembly.existing_log_reader(settings, log.traces_topic)) as origin,
            bar(f"reading {log.traces_topic}", _num_messages(origin), transient=True) as saw,
        ):
            done = redriven_before(origin, on_message=lambda message: saw(), idle_s=idle_s)
    with (
        closing(_dead_letters(settings)) as reader,
        closing(assembly.log_writer(settings, log.traces_topic)) as writer,
        bar("redriving", _num_messages(reader), transient=True) as saw,
    ):
        job = Redrive(writer, topic=log.traces_topic, dead_letters_topic=log.dead_letters_topic)
        return job.run(_counted(dead_letters.read(reader, idle_s=idle_s), saw), choice, done)


def _num_messages(reader: "LogReader") -> int:
    return sum(reader.end_offsets().values())


def _counted(messages: "Iterator[DeadLetter]", saw: Callable[[], None]) -> "Iterator[DeadLetter]":
    for dead_letter in messages:
        saw()
        yield dead_letter


def _choice(reasons: list[str], places: list[str], everything: bool) -> "Choice":
    from omnidraft.distill.ingest.dead_letters import Choice

    if not (reasons or places or everything):
        raise RequestError("redrive what? Name letters with --reason or --offset PARTITION:OFFSET, or say --all")
    return Choice(frozenset(reasons), frozenset(map(_parse_offset, places)), everything)


def _parse_offset(text: str) -> tuple[int, int]:
    partition, colon, offset = text.partition(":")
    if not (colon and partition.isdecimal() and offset.isdecimal()):
        raise RequestError(f"--offset must be PARTITION:OFFSET, got {text!r}")
    return int(partition), int(offset)


def _dead_letters(settings: "config.Settings") -> "LogReader":
    from omnidraft import assembly

    return assembly.existing_log_reader(settings, settings.log.dead_letters_topic)


def _find(reader: "LogReader", partition: int, offset: int) -> "DeadLetter":
    from omnidraft.distill.ingest.dead_letters import DeadLetter

    ends = reader.end_offsets()
    if offset >= ends.get(partition, 0):
        raise RequestError(f"no dead letter at {partition}:{offset}; partitions end at {dict(ends)}")
    reader.seek({**ends, partition: offset})
    for message in reader.poll(1, timeout_s=10.0).messages:
        if (message.partition, message.offset) == (partition, offset):
            return DeadLetter(message)
    raise RequestError(f"the dead letter at {partition}:{offset} is not there any more")


def _summary(dead_letter: "DeadLetter") -> dict[str, Any]:
    origin = dead_letter.origin
    return {
        "partition": dead_letter.position[0],
        "offset": dead_letter.position[1],
        "reason": dead_letter.reason,
        "error": dead_letter.error,
        "origin_topic": dead_letter.origin_topic,
        "origin_partition": origin and origin[0],
        "origin_offset": origin and origin[1],
        "bytes": dead_letter.original_bytes,
        "cut": dead_letter.cut,
    }


def _content(dead_letter: "DeadLetter") -> dict[str, Any]:
    """Return the record, else its readable fields, else its first bytes."""
    from omnidraft.errors import UnknownKey, UnknownSchema, WireError
    from omnidraft.traces import codec

    value = dead_letter.message.value
    first_bytes = {"first_bytes": value[:HEX_BYTES].hex(" ")}
    try:
        return {"record": codec.to_json(codec.decode(value, dead_letter.original_headers))}
    except (UnknownSchema, UnknownKey):
        return first_bytes
    except WireError as exc:
        fields = codec.readable_fields(value)
        return {"now": str(exc)} | ({"readable_fields": fields} if fields else first_bytes)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("place", "reason", "error", "origin", "bytes", "cut")
    for row in rows:
        error = printable(row["error"])
        origin = "{origin_topic} {origin_partition}:{origin_offset}".format(**row)
        table.add_row(
            f"{row['partition']}:{row['offset']}",
            printable(row["reason"]),
            error if len(error) <= SHOWN_CHARACTERS else error[:SHOWN_CHARACTERS] + "...",
            printable(origin),
            str(row["bytes"]),
            "cut" if row["cut"] else "",
        )
    return table


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
