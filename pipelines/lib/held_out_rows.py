"""The rows that a transfer learned and held out: models that it made are measured on the latter alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnidraft.errors import RequestError
from omnidraft.transfer.report import JSON_FILE


def require_held_out_alike(folder: Path, every: int, split: str | None) -> None:
    """Raise RequestError where the transfer held out other rows: some of those measured would be learned ones.

    Args:
        folder: what omnidraft transfer wrote.
        every: one row in so many is measured.
    """
    run = _run(folder)
    made = run.get("held_out_every"), run.get("split")
    if made != (every, split):
        option = f" --split {made[1]}" if made[1] else ""
        raise RequestError(f"{folder} was made with --held-out-every {made[0]}{option}; measure it with the same")


def held_out_alike(folders: Sequence[Path]) -> dict[str, Any]:
    """Return which rows all these transfers held out. Raises RequestError where they differ."""
    runs = [{key: _run(folder).get(key) for key in ("held_out_every", "split")} for folder in folders]
    for folder, run in zip(folders[1:], runs[1:], strict=True):
        if run != runs[0]:
            raise RequestError(f"{folder} held out other rows ({run}) than {folders[0]} ({runs[0]})")
    return runs[0]


def require_texts_alike(folder: Path, digest: str) -> None:
    """Raise RequestError where the transfer had other texts, so that other tokens were seldom in them.

    Args:
        digest: see wiring.transfer.texts_digest.
    """
    if _run(folder).get("texts", digest) != digest:
        raise RequestError(
            f"{folder} was made with other texts; --by-occurrence needs its --data, --num-texts and --max-tokens"
        )


def _run(folder: Path) -> dict[str, Any]:
    """Return what a transfer's report says of its run. Raises RequestError."""
    try:
        run: dict[str, Any] = json.loads((folder / JSON_FILE).read_text())["run"]
    except (OSError, ValueError, KeyError) as exc:
        raise RequestError(f"{folder} is no folder that omnidraft transfer wrote: {exc!r}") from exc
    return run
