"""Prompt files: one JSON object per line, with `prompt` or `question`; and the built-in prompts."""

import json
from dataclasses import dataclass
from pathlib import Path

from omnidraft.errors import RequestError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file."""

    text: str
    answer_ids: tuple[int, ...] = ()
    """The target's ids of a known answer, if the file has them."""
    answer: str | None = None
    """A known answer as text."""
    split: str | None = None
    """The part of the data set that it belongs to, if the file has one."""
    schema: str | None = None
    """The JSON schema of its answer, if the file has one."""
    reference: str | None = None
    """The data set's own answer, if the file has one."""


def read(path: Path, num: int | None = None, *, skip: int = 0, split: str | None = None) -> list[Prompt]:
    """Return up to `num` prompts after the first `skip`. Raises RequestError, naming file and line.

    Args:
        split: skip the rows of other splits.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"cannot read prompts: {exc}") from exc
    prompts = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if split is not None:
        prompts = [prompt for prompt in prompts if prompt.split in (None, split)]
    chosen = prompts[skip : None if num is None else skip + num]
    if not chosen:
        of_split = f" of split {split}" if split is not None else ""
        raise RequestError(f"{path} has no prompts{of_split}" + (f" after the first {skip}" if skip else ""))
    return chosen


def built_in(num: int | None = None) -> list[Prompt]:
    """Return common questions and unusual texts: emoji, scripts without spaces, tabs, very long words."""
    return read(Path(__file__).with_suffix(".jsonl"), num)


def _row(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        text = row.get("prompt") or row["question"]
        if not isinstance(text, str):
            raise TypeError(f"not a text: {text!r}")
        answer = row.get("answer")
        if not isinstance(answer, str | None):
            raise TypeError(f"answer is not a text: {answer!r}")
        reference = row["reference"] if isinstance(row.get("reference"), str) else None
        _require_encodable(text, answer, reference)
        schema = row.get("schema")
        has_schema = isinstance(schema, dict)
        return Prompt(
            text,
            tuple(map(int, row.get("answer_ids", ()))),
            answer,
            row.get("split"),
            json.dumps(schema) if has_schema else None,
            reference,
        )
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise RequestError(f"{path}:{number} needs a JSON object with a prompt or question: {exc!r}") from exc


def _require_encodable(*texts: str | None) -> None:
    """Raise ValueError for a text that has half of a surrogate pair, as an escape in JSON can."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"character {exc.start} is half of a surrogate pair, not text") from exc
