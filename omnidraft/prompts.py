"""Prompt files: one JSON object per line, with `prompt` or `question`; and the built-in prompts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    except OSError as exc:
        raise RequestError(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise RequestError(f"cannot read {path}: it is not UTF-8 text") from exc
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
        return _prompt(json.loads(line))
    except json.JSONDecodeError as exc:
        why = f"it is not JSON ({exc.msg}, column {exc.colno})"
        raise RequestError(f"{path}:{number} needs a JSON object with a prompt or question: {why}") from exc
    except ValueError as exc:
        raise RequestError(f"{path}:{number} needs a JSON object with a prompt or question: {exc}") from exc


def _prompt(row: Any) -> Prompt:
    """Return the prompt of a row. Raises ValueError, in plain words, for a row that is none."""
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    field = "prompt" if row.get("prompt") else "question"
    if row.get(field) is None:
        raise ValueError("it has neither, or an empty prompt")
    text, answer, answer_ids = row[field], row.get("answer"), row.get("answer_ids", [])
    for name, value in ((field, text), ("answer", answer)):
        if not isinstance(value, str | None):
            raise ValueError(f"the {name} is not a text: {json.dumps(value)}")
    if not isinstance(answer_ids, list) or not all(type(each) is int for each in answer_ids):
        raise ValueError(f"answer_ids is not a list of whole numbers: {json.dumps(answer_ids)}")
    reference = row["reference"] if isinstance(row.get("reference"), str) else None
    _require_encodable(text, answer, reference)
    schema = json.dumps(row["schema"]) if isinstance(row.get("schema"), dict) else None
    return Prompt(text, tuple(answer_ids), answer, row.get("split"), schema, reference)


def _require_encodable(*texts: str | None) -> None:
    """Raise ValueError for a text that has half of a surrogate pair, as an escape in JSON can."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"character {exc.start} is half of a surrogate pair, not text") from exc
