"""The texts of a prompt file that the loss is measured on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omnidraft import prompts
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
    rows = sorted(prompts.read(path), key=lambda row: (row.split or "test") != "test")
    ids: list[int] = []
    for row in rows:
        if len(ids) >= num_tokens:
            break
        ids += tokenizer.encode(f"{row.text}\n{row.reference or row.answer or ''}\n\n")
    del ids[num_tokens:]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    chats = [tokenizer.chat_prompt_ids([{"role": "user", "content": row.text}]) for row in rows[:num_prompts]]
    return QualityTexts(path.stem, [window for window in windows if len(window) > 1], chats)
