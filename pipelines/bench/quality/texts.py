"""The texts of a prompt file that the loss is measured on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omnidraft.errors import RequestError
from omnidraft.models.hf.tokenizer import HfTokenizer

WINDOW = 512
"""Tokens of each text that perplexity is measured on."""


@dataclass(frozen=True, slots=True)
class QualityTexts:
    """The texts of one file as the target's ids."""

    name: str
    windows: Sequence[Sequence[int]]
    """Parts of the file's prompts and answers, one after another."""
    prompts: Sequence[Sequence[int]]
    """Chat prompts, whose greedy answers are compared."""


def read(path: Path, tokenizer: HfTokenizer, *, num_tokens: int, num_prompts: int) -> QualityTexts:
    """Read JSON lines with a prompt or question, and a reference or answer if there is one; test split first.

    Raises:
        RequestError: the file cannot be read, or has no such line.
    """
    pairs = _pairs(path)
    ids: list[int] = []
    for prompt, reference in pairs:
        if len(ids) >= num_tokens:
            break
        ids += tokenizer.encode(f"{prompt}\n{reference}\n\n")
    del ids[num_tokens:]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    prompts = [tokenizer.chat_prompt_ids([{"role": "user", "content": prompt}]) for prompt, _ in pairs[:num_prompts]]
    return QualityTexts(path.stem, [window for window in windows if len(window) > 1], prompts)


def _pairs(path: Path) -> list[tuple[str, str]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows.sort(key=lambda row: row.get("split", "test") != "test")
        pairs = [
            (row.get("prompt") or row["question"], row.get("reference") or row.get("answer") or "") for row in rows
        ]
    except (OSError, ValueError, KeyError, AttributeError) as exc:
        raise RequestError(f"{path} needs JSON lines with a prompt or question: {exc!r}") from exc
    if not pairs:
        raise RequestError(f"{path} has no prompts")
    return pairs
