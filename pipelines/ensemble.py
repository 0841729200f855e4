"""Bits per byte of models that share a tokenizer, alone and together, with equal weights and with fitted ones.

`python -m pipelines.ensemble MODEL MODEL --data FILE`. Weights are fitted on the rows of all files that are not held
out, by expectation maximisation for a mean of probabilities, whose likelihood has no other maximum. Models that
`omnidraft transfer` made are measured on rows that it held out, or not at all.
Shapes: M models, N tokens, T ids of a text, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from omnidraft.errors import VocabularyError
from omnidraft.hosts import process
from omnidraft.models.ensemble import Mean, mean_logits
from omnidraft.progress import bar
from omnidraft.transfer.bits_per_byte import hidden_states
from omnidraft.transfer.report import JSON_FILE
from omnidraft.wiring.transfer import split_texts
from omnidraft.wiring.transfer_models import frozen, load_model, load_pair
from pipelines.lib import report
from pipelines.lib.choices import named_files
from pipelines.lib.held_out_rows import require_held_out_alike

if TYPE_CHECKING:
    from omnidraft.models.hf.trainable_drafter import TransformersTrainable
    from omnidraft.transfer.texts import AlignedText

_EM_STEPS = 200


def main(
    models: Annotated[list[str], typer.Argument(help="Names or folders of two models or more.")],
    data: Annotated[list[Path], typer.Option(help="JSON lines with texts; may be given again.")],
    max_tokens: Annotated[int, typer.Option(min=2, help="The most tokens of a text.")] = 256,
    num_texts: Annotated[int | None, typer.Option(min=2, help="Rows from the beginning of each file.")] = None,
    split: Annotated[str | None, typer.Option(help="Only rows of this split, where a file names splits.")] = None,
    num_fitted: Annotated[int, typer.Option(min=1, help="Rows of each file that weights are fitted on.")] = 8,
    held_out_every: Annotated[int, typer.Option(min=2, help="One row in so many is measured.")] = 16,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print bits per byte of each file's held-out texts, for each model and for their means."""
    pairs = [load_pair(models[0], name) for name in models]
    if any(pair.new.vocabulary.token_bytes != pairs[0].old.vocabulary.token_bytes for pair in pairs):
        raise VocabularyError(f"{', '.join(models)} have several tokenizers; omnidraft transfer gives them one")
    for pair in pairs:
        if (pair.new_folder / JSON_FILE).exists():
            require_held_out_alike(pair.new_folder, held_out_every, split)
    options = {"max_tokens": max_tokens, "every": held_out_every, "num": num_texts, "split": split}
    files = {name: split_texts(path, pairs[0], **options) for name, path in named_files(data).items()}  # type: ignore[arg-type]
    scorers = [frozen(load_model(pair.new_folder, name)) for pair, name in zip(pairs, models, strict=True)]
    fitted = fit_weights(_log_p(scorers, [text for learned, _ in files.values() for text in learned[:num_fitted]]))
    rows = _rows(scorers, models, fitted, {name: held_out for name, (_, held_out) in files.items()})
    _print(rows, fitted, list(files))
    if json_path is not None:
        report.save({"models": models, "weights": fitted, "bits_per_byte": rows}, json_path)


def fit_weights(log_p_MN: Tensor) -> list[float]:
    """Return the weights of the likeliest mean of probabilities; they sum to 1 and are positive.

    Args:
        log_p_MN: each model's log-probability of each token.
    """
    weight_M = torch.full((len(log_p_MN),), 1 / len(log_p_MN), dtype=torch.float64)
    for _ in range(_EM_STEPS):
        weight_M = (log_p_MN.double() + weight_M.log()[:, None]).softmax(dim=0).mean(dim=1).clamp_min(1e-9)
    return (weight_M / weight_M.sum()).tolist()  # type: ignore[no-any-return]


def _rows(
    scorers: "Sequence[TransformersTrainable]",
    models: Sequence[str],
    fitted: Sequence[float],
    files: "Mapping[str, Sequence[AlignedText]]",
) -> dict[str, dict[str, float]]:
    """Return bits per byte by row and file."""
    equal = [1 / len(models)] * len(models)
    means: dict[str, tuple[Sequence[float], Mean]] = {
        "mean of probabilities": (equal, "probabilities"),
        "mean of log-probabilities": (equal, "log-probabilities"),
        "fitted, probabilities": (fitted, "probabilities"),
        "fitted, log-probabilities": (fitted, "log-probabilities"),
    }
    nats = {row: dict.fromkeys(files, 0.0) for row in (*models, *means)}
    with bar("measuring", sum(map(len, files.values()))) as advance:
        for file, texts in files.items():
            for text in texts:
                logits, next_T = _logits(scorers, text), torch.from_numpy(text.new_ids_T[1:])[:, None]
                for name, each_TV in zip(models, logits, strict=True):
                    nats[name][file] -= each_TV.log_softmax(dim=-1).gather(1, next_T).sum().item()
                for row, (weights, mean) in means.items():
                    mean_TV = mean_logits(logits, weights, mean).log_softmax(dim=-1)
                    nats[row][file] -= mean_TV.gather(1, next_T).sum().item()
                advance()
    num_bytes = {file: sum(text.num_bytes for text in texts) for file, texts in files.items()}
    return {row: {file: each / math.log(2) / num_bytes[file] for file, each in of.items()} for row, of in nats.items()}


@torch.no_grad()
def _logits(scorers: "Sequence[TransformersTrainable]", text: "AlignedText") -> list[Tensor]:
    """Return each model's logits [T, V] before each id of a text but the first."""
    return [each.logits(hidden_states(each, text.new_ids_T)[:-1]).float() for each in scorers]


def _log_p(scorers: "Sequence[TransformersTrainable]", texts: "Sequence[AlignedText]") -> Tensor:
    """Return each model's log-probability of each token of these texts [M, N]."""
    parts = []
    with bar("fitting", len(texts)) as advance:
        for text in texts:
            next_T = torch.from_numpy(text.new_ids_T[1:])[:, None]
            logits = _logits(scorers, text)
            parts.append(torch.stack([each.log_softmax(dim=-1).gather(1, next_T)[:, 0] for each in logits]))
            advance()
    return torch.cat(parts, dim=1)


def _print(rows: Mapping[str, Mapping[str, float]], fitted: Sequence[float], files: Sequence[str]) -> None:
    table = Table("", *files, title="Bits per byte of held-out texts")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[file]:.4f}" for file in files))
    Console().print(table)
    print("fitted weights: " + ", ".join(f"{weight:.3f}" for weight in fitted))


if __name__ == "__main__":
    process.entry("ensemble", main)
