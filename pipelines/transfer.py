"""Bits per byte of a model with its own tokenizer, and with another: after each initialisation, and after training.

`python -m pipelines.transfer MODEL --tokenizer OTHER --data FILE --transferred DIR`. A file's held-out rows are those
that `omnidraft transfer` holds out with the same options, so nothing is measured that was learned.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.transfer.bits_per_byte import bits_per_byte
from omnidraft.wiring.transfer import split_texts, text_nats, texts_digest
from omnidraft.wiring.transfer_models import TokenizerPair, frozen, initialised, load_model, load_pair
from pipelines.lib import report
from pipelines.lib.choices import chosen, named_files
from pipelines.lib.chunk_costs import (
    OCCURRENCES,
    PIECES,
    nats_by_class,
    num_pieces,
    occurrences,
    rarest_occurrences,
)
from pipelines.lib.held_out_rows import require_held_out_alike, require_texts_alike

if TYPE_CHECKING:
    import numpy as np

    from omnidraft.transfer.texts import AlignedText

METHODS = ("mean", "fvt", "omp")
ORIGINAL = "original"
Side = Literal["old", "new"]
Nats = dict[str, "list[np.ndarray]"]
"""Of each file, those of each text's tokens."""
_Kind = tuple[str, "Callable[[AlignedText], np.ndarray]", Sequence[int]]
"""What chunks are told apart by: its name, a number for each chunk, and the least number of each class."""


def main(
    model: Annotated[str, typer.Argument(help="The model before: a name, folder or hub id.")],
    tokenizer: Annotated[str, typer.Option(help="The model, or a folder, whose tokenizer it gets.")],
    data: Annotated[list[Path], typer.Option(help="JSON lines with texts; may be given again.")],
    init: Annotated[str, typer.Option(help=f"Some of {', '.join(METHODS)}, or nothing.")] = ",".join(METHODS),
    transferred: Annotated[
        list[Path] | None, typer.Option(help="A folder that omnidraft transfer wrote; may be given again.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="The most tokens of a text.")] = 256,
    num_texts: Annotated[int | None, typer.Option(min=1, help="Rows from the beginning of each file.")] = None,
    split: Annotated[str | None, typer.Option(help="Only rows of this split, where a file names splits.")] = None,
    held_out_every: Annotated[int, typer.Option(min=2, help="One row in so many is measured.")] = 16,
    by_occurrence: Annotated[
        bool,
        typer.Option("--by-occurrence", help="Tell what tokens cost that training had seldom, for each --transferred."),
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print bits per byte of each file's held-out texts."""
    methods, folders = chosen(init, METHODS, "initialisation"), named_files(transferred or [])
    for name, folder in folders.items():
        if name in (ORIGINAL, *METHODS):
            raise RequestError(f"{folder} is named as a row of the table; rename it")
        require_held_out_alike(folder, held_out_every, split)
    pair = load_pair(model, tokenizer)
    options = {"max_tokens": max_tokens, "every": held_out_every, "num": num_texts, "split": split}
    splits = {name: split_texts(path, pair, **options) for name, path in named_files(data).items()}  # type: ignore[arg-type]
    files = {name: held_out for name, (_, held_out) in splits.items()}
    learned = [text for texts, _ in splits.values() for text in texts]
    if by_occurrence:
        digest = texts_digest(learned, (text for texts in files.values() for text in texts))
        for folder in folders.values():
            require_texts_alike(folder, digest)
    num_bytes = {name: sum(text.num_bytes for text in texts) for name, texts in files.items()}
    nats: dict[str, Nats] = {}
    rows: dict[str, dict[str, float]] = {}
    for name, side, load in _models(model, pair, methods, folders):
        nats[name] = _nats(load, side, files)
        rows[name] = {file: bits_per_byte(texts, num_bytes[file]) for file, texts in nats[name].items()}
        Console(stderr=True).print(name, rows[name])
    _print(rows, files)
    figures: dict[str, Any] = {"bits_per_byte": rows, "held_out_bytes": num_bytes}
    kinds: dict[str, _Kind] = {"by_pieces": ("new tokens of a chunk", num_pieces, PIECES)}
    if by_occurrence:
        count_V = occurrences(learned, len(pair.new.vocabulary))
        rarest = partial(rarest_occurrences, count_V=count_V)
        kinds["by_occurrence"] = ("occurrences of the rarest token", rarest, OCCURRENCES)
    for key, kind in kinds.items():
        figures[key] = {name: _by_class(name, nats, files, kind) for name in folders}
    if json_path is not None:
        report.save(figures, json_path)


def _models(
    model: str, pair: TokenizerPair, methods: list[str], folders: Mapping[str, Path]
) -> Iterator[tuple[str, Side, Callable[[], Any]]]:
    """Yield (name, tokenizer, how it is loaded) of each model to measure."""
    yield ORIGINAL, "old", lambda: load_model(pair.old_folder, model)
    for method in methods:
        yield method, "new", lambda method=method: initialised(model, method, pair)  # type: ignore[misc]
    for name, folder in folders.items():
        yield name, "new", lambda folder=folder: load_model(folder, str(folder))  # type: ignore[misc]


def _nats(load: Callable[[], Any], side: Side, files: "Mapping[str, list[AlignedText]]") -> Nats:
    scorer = frozen(load())
    nats = {name: list(text_nats(scorer, texts, side)) for name, texts in files.items()}
    gc.collect()
    return nats


def _by_class(
    name: str,
    nats: Mapping[str, Nats],
    files: "Mapping[str, list[AlignedText]]",
    kind: _Kind,
) -> dict[str, list[dict[str, float]]]:
    """Return, and print, rows of nats for each file of a transferred model."""
    title, amounts, least = kind
    found = {
        file: nats_by_class(nats[ORIGINAL][file], nats[name][file], texts, amounts, least)
        for file, texts in files.items()
    }
    table = Table(title, *files, title=f"{name}: bits beside the original's, % of them")
    sums = {file: sum(row["before"] for row in rows) for file, rows in found.items()}
    for number, each in enumerate(least):
        added = (100 * (rows[number]["after"] - rows[number]["before"]) / sums[file] for file, rows in found.items())
        table.add_row(f"{each} and more", *(f"{percent:+.1f}" for percent in added))
    Console().print(table)
    return found


def _print(rows: Mapping[str, Mapping[str, float]], files: "Mapping[str, list[AlignedText]]") -> None:
    table = Table("", *files, title="Bits per byte of held-out texts")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[file]:.4f}" for file in files))
    Console().print(table)


if __name__ == "__main__":
    process.entry("transfer", main)
