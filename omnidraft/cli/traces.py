"""`omnidraft traces`: print, export and verify the trace log, and manage its dead letters."""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, files
from omnidraft.cli import dead_letters
from omnidraft.cli.options import Config, Target, group, printable
from omnidraft.errors import ConfigError, WireError

if TYPE_CHECKING:
    from omnidraft.audit.findings import Report
    from omnidraft.ports import LogReader, Message
    from omnidraft.traces.record import TraceRecord


app = group("The trace log that decoding writes and the learner reads.")
app.add_typer(dead_letters.app, name="dead-letters")

SHOWN_FAULTS = 20


@app.callback()
def traces() -> None:
    """The trace log that decoding writes and the learner reads."""


@app.command("verify")
def verify(
    target: Target = None,
    counts_only: Annotated[
        bool, typer.Option("--counts-only", help="Do not fetch the newest snapshot's memory, which is large.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where all of it goes.")] = None,
    config_path: Config = None,
) -> None:
    """Compare the trace log with what snapshots learned and with the dead letters; exit code 1 when they disagree."""
    from omnidraft.assembly.fleet import audit
    from omnidraft.files import require_writable_file
    from omnidraft.progress import bar

    require_writable_file(json_path, makes_folder=False)
    settings = config.load(config_path, models={"target": target})
    with bar(f"reading {settings.log.traces_topic}: messages", None, transient=True) as saw:
        report = audit(settings, counts_only=counts_only, on_poll=saw)
    print_report(report)
    if json_path is not None:
        files.save_json(report.plain_data(), json_path)
    if report.faults:
        raise typer.Exit(1)


@app.command("new-key")
def new_key() -> None:
    """Print a fresh key, for log.encryption_keys."""
    from omnidraft.bus import encryption

    print(encryption.new_key())


@app.command("tail")
def tail(
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many of the newest records.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    config_path: Config = None,
) -> None:
    """Print trace records as JSON, one a line; unreadable ones as their error."""
    from omnidraft import assembly

    settings = config.load(config_path)
    with closing(assembly.existing_log_reader(settings, settings.log.traces_topic)) as reader:
        _print_messages(_newest(reader, num))
        while follow:
            _print_messages(reader.poll(num, timeout_s=1.0).messages)


@app.command("export")
def export(
    path: Annotated[Path, typer.Argument(help="An Avro file that only its owner may read.")],
    num: Annotated[
        int, typer.Option("--num", "-n", min=1, help="How many of the newest messages are looked at.")
    ] = 256,
    tenants: Annotated[
        list[str] | None, typer.Option("--tenant", help="Only of this tenant; may be given several times.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only those that the learner holds out: for learner.pinned_held_out.")
    ] = False,
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Write the newest records of a target into an archive, for pipelines or as learner.pinned_held_out."""
    from omnidraft import assembly
    from omnidraft.distill.ingest.record_disposition import is_held_out
    from omnidraft.files import require_writable_file
    from omnidraft.traces import archive

    require_writable_file(path, makes_folder=False)
    settings = config.load(config_path, models={"target": target})
    with closing(assembly.existing_log_reader(settings, settings.log.traces_topic)) as reader:
        readable = list(_readable(_newest(reader, num)))
    pair = (settings.models.target, settings.models.drafter)
    ours = [each for each in readable if (each.target, each.drafter) == pair]
    chosen = [each for each in ours if not tenants or each.tenant in tenants]
    if held_out:
        chosen = [each for each in chosen if is_held_out(each, settings.learner.held_out_every)]
    if not chosen:
        raise ConfigError(
            f"none of the newest {num} messages is a record of {pair[0]} that was asked for; ask for more"
        )
    archive.write(path, chosen)
    print(f"{len(chosen)} records of {pair[0]} are in {path}")


def _newest(reader: "LogReader", num: int) -> "list[Message]":
    """Return the newest messages of all partitions, oldest first. Raises BusError."""
    from omnidraft.distill.ingest import topic_scan

    ends = reader.end_offsets()
    reader.seek_back(num)
    newest: list[Message] = []
    there = topic_scan.still_there(reader, ends)
    for polled in topic_scan.polls_until(lambda: reader.poll(num, timeout_s=1.0), there):
        newest = sorted([*newest, *polled.messages], key=_age)[-num:]
    return newest


def _readable(messages: "Iterable[Message]") -> "Iterator[TraceRecord]":
    from omnidraft.traces import codec

    for message in messages:
        with suppress(WireError):  # `tail` shows it, and the learner dead-letters it
            if message.damage is None:
                yield codec.decode(message.value, message.headers)


def _age(message: "Message") -> tuple[int, int, int]:
    return message.timestamp_ms, message.partition, message.offset


def _print_messages(messages: "Iterable[Message]") -> None:
    from omnidraft.traces import codec

    for message in messages:
        if message.damage is not None:
            lost = {"reason": message.damage.reason, "error": message.damage.error}
            row = {"partition": message.partition, "offset": message.offset, **lost}
            print(json.dumps(row | {"num_messages": message.damage.num_messages}), flush=True)
            continue
        try:
            row = codec.to_json(codec.decode(message.value, message.headers))
        except WireError as exc:
            row = {"partition": message.partition, "offset": message.offset, "error": str(exc)}
        print(json.dumps(row), flush=True)


def print_report(report: "Report") -> None:
    """Print a row per partition, the first faults, and a summary."""
    console = Console(markup=False, highlight=False)
    table = Table("partition", "held from", "learned up to", "end", "to learn", "what became of them")
    for each in report.partitions:
        dispositions = ", ".join(f"{number} {printable(name)}" for name, number in each.fates.items())
        numbers = (each.partition, each.first, each.offset, each.end, each.num_to_learn)
        table.add_row(*map(str, numbers), dispositions)
    console.print(table)
    for fault in report.faults[:SHOWN_FAULTS]:
        where = "" if fault.partition is None else f" {fault.partition}:{fault.offset}"
        version = "" if fault.version is None else f" snapshot {fault.version}"
        console.print(f"{fault.kind}{where}{version}: {fault.num}: {printable(fault.what)}", soft_wrap=True)
    if len(report.faults) > SHOWN_FAULTS:
        console.print(f"... and {len(report.faults) - SHOWN_FAULTS} more")
    console.print(_summary(report), soft_wrap=True)


def _summary(report: "Report") -> str:
    from omnidraft.audit.findings import FaultKind

    if report.version is None:
        return "no snapshot yet"
    counts = ", ".join(f"{report.num(kind)} {kind.replace('_', ' ')}" for kind in FaultKind)
    expired = f"; {report.num_expired} expired before they were learned" if report.num_expired else ""
    return f"up to snapshot {report.version}: {counts}{expired}"
