"""The rows that a transfer held out: models that it made are measured on these alone."""

import json
from pathlib import Path

from omnidraft.errors import RequestError
from omnidraft.transfer.report import JSON_FILE


def require_held_out_alike(folder: Path, every: int, split: str | None) -> None:
    """Raise RequestError where the transfer held out other rows: some of those measured would be learned ones.

    Args:
        folder: what omnidraft transfer wrote.
        every: one row in so many is measured.
    """
    try:
        run = json.loads((folder / JSON_FILE).read_text())["run"]
        made = run["held_out_every"], run.get("split")
    except (OSError, ValueError, KeyError) as exc:
        raise RequestError(f"{folder} is no folder that omnidraft transfer wrote: {exc!r}") from exc
    if made != (every, split):
        option = f" --split {made[1]}" if made[1] else ""
        raise RequestError(f"{folder} was made with --held-out-every {made[0]}{option}; measure it with the same")
