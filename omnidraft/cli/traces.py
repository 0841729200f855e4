"""`omnidraft traces`: look into the trace log, check it, and into its dead letters."""

import json
from typing import Annotated

import typer

from omnidraft import config
from omnidraft.cli import dead_letters
from omnidraft.cli.options import Config
from omnidraft.cli.verify import verify

app = typer.Typer(help="The trace log that decoding writes and the learner reads.", no_args_is_help=True)
app.add_typer(dead_letters.app, name="dead-letters")
app.command()(verify)


@app.callback()
def traces() -> None:
    """The trace log that decoding writes and the learner reads."""


@app.command("new-key")
def new_key() -> None:
    """Print a fresh key, for log.encryption_keys or registry.signing_key."""
    from omnidraft.bus import encrypted

    print(encrypted.new_key())


@app.command("tail")
def tail(
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many of the newest records.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    config_path: Config = None,
) -> None:
    """Print trace records as JSON, one a line; unreadable ones as their error."""
    from omnidraft import wiring
    from omnidraft.errors import WireError
    from omnidraft.traces import codec

    settings = config.load(config_path)
    reader = wiring.log_reader(settings, settings.log.traces_topic)
    ends = reader.end_offsets()
    reader.seek({partition: max(0, end - num) for partition, end in ends.items()})
    printed = 0
    while follow or printed < min(num, sum(ends.values())):
        for message in reader.poll(num, timeout_s=1.0).messages:
            printed += 1
            try:
                print(json.dumps(codec.to_json(codec.decode(message.value, message.headers))), flush=True)
            except WireError as exc:
                print(json.dumps({"partition": message.partition, "offset": message.offset, "error": str(exc)}))
    reader.close()
