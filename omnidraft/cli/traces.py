"""`omnidraft traces`: print and verify the trace log, and manage its dead letters."""

import json
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft import config
from omnidraft.cli import dead_letters
from omnidraft.cli.options import Config
from omnidraft.cli.verify import verify
from omnidraft.errors import WireError

if TYPE_CHECKING:
    from omnidraft.ports import Message

app = typer.Typer(help="The trace log that decoding writes and the learner reads.", no_args_is_help=True)
app.add_typer(dead_letters.app, name="dead-letters")
app.command()(verify)


@app.callback()
def traces() -> None:
    """The trace log that decoding writes and the learner reads."""


@app.command("new-key")
def new_key() -> None:
    """Print a fresh key, for log.encryption_keys or registry.signing_key."""
    from omnidraft.bus import encryption

    print(encryption.new_key())


@app.command("tail")
def tail(
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many of the newest records.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    config_path: Config = None,
) -> None:
    """Print trace records as JSON, one a line; unreadable ones as their error."""
    from omnidraft import wiring
    from omnidraft.distill.ingest import topic_scan

    settings = config.load(config_path)
    with closing(wiring.log_reader(settings, settings.log.traces_topic)) as reader:
        ends = reader.end_offsets()
        reader.seek_back(num)
        newest: list[Message] = []
        for polled in topic_scan.polls_until(lambda: reader.poll(num, timeout_s=1.0), ends):
            newest = sorted([*newest, *polled.messages], key=_age)[-num:]
        _print(newest)
        while follow:
            _print(reader.poll(num, timeout_s=1.0).messages)


def _age(message: "Message") -> tuple[int, int, int]:
    return message.timestamp_ms, message.partition, message.offset


def _print(messages: "Iterable[Message]") -> None:
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
