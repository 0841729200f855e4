"""Bits per byte of a model with its own tokenizer, and with another: after each initialisation, and after training.

`python -m pipelines.transfer MODEL --tokenizer OTHER --data FILE --transferred DIR`. A file's held-out rows are those
that `omnidraft transfer` holds out with the same options, so nothing is measured that was learned.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from omnidraft.hosts import process
from omnidraft.wiring.transfer import bits, split_texts
from omnidraft.wiring.transfer_models import TokenizerPair, frozen, initialised, load_model, load_pair
from pipelines.lib import rare_tokens, report
from pipelines.lib.choices import chosen, named_files

if TYPE_CHECKING:
    from omnidraft.transfer.texts import AlignedText

METHODS = ("mean", "fvt", "omp")
Side = Literal["old", "new"]


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
    held_out_every: Annotated[int, typer.Option(min=2, help="One row in so many is measured.")] = 16,
    by_occurrence: Annotated[
        bool,
        typer.Option("--by-occurrence", help="Tell what tokens cost that training had seldom, for each --transferred."),
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print bits per byte of each file's held-out texts."""
    methods = chosen(init, METHODS, "initialisation")
    pair = load_pair(model, tokenizer)
    options = {"max_tokens": max_tokens, "every": held_out_every, "num": num_texts}
    splits = {name: split_texts(path, pair, **options) for name, path in named_files(data).items()}  # type: ignore[arg-type]
    files = {name: held_out for name, (_, held_out) in splits.items()}
    rows: dict[str, dict[str, float]] = {}
    for name, side, load in _models(model, pair, methods, transferred or []):
        rows[name] = _measured(load, side, files)
        Console(stderr=True).print(name, rows[name])
    _print(rows, files)
    figures: dict[str, Any] = {"bits_per_byte": rows}
    if by_occurrence:
        learned = [text for texts, _ in splits.values() for text in texts]
        figures["by_occurrence"] = _by_occurrence(model, pair, transferred or [], learned, files)
    if json_path is not None:
        num_bytes = {name: sum(text.num_bytes for text in texts) for name, texts in files.items()}
        report.save(figures | {"held_out_bytes": num_bytes}, json_path)


def _models(
    model: str, pair: TokenizerPair, methods: list[str], transferred: list[Path]
) -> Iterator[tuple[str, Side, Callable[[], Any]]]:
    """Yield (name, tokenizer, how it is loaded) of each model to measure."""
    yield "original", "old", lambda: load_model(pair.old_folder, model)
    for method in methods:
        yield method, "new", lambda method=method: initialised(model, method, pair)  # type: ignore[misc]
    for folder in transferred:
        yield folder.name, "new", lambda folder=folder: load_model(folder, str(folder))  # type: ignore[misc]


def _measured(load: Callable[[], Any], side: Side, files: "Mapping[str, list[AlignedText]]") -> dict[str, float]:
    started_s = time.monotonic()
    scorer = frozen(load())
    seconds = time.monotonic() - started_s
    row = {name: bits(scorer, texts, side) for name, texts in files.items()}
    gc.collect()
    return row | {"load_s": round(seconds, 1)}


def _by_occurrence(
    model: str,
    pair: TokenizerPair,
    transferred: list[Path],
    learned: "list[AlignedText]",
    files: "Mapping[str, list[AlignedText]]",
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return, and print, rows of nats for each transferred model and file."""
    count_V = rare_tokens.occurrences(learned, len(pair.new.vocabulary))
    before = frozen(load_model(pair.old_folder, model))
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for folder in transferred:
        after = frozen(load_model(folder, str(folder)))
        found[folder.name] = {
            name: rare_tokens.nats_by_occurrence(before, after, texts, count_V) for name, texts in files.items()
        }
        _print_by_occurrence(folder.name, found[folder.name])
    return found


def _print_by_occurrence(title: str, files: Mapping[str, list[dict[str, float]]]) -> None:
    """Print what chunks of each class add to a file's bits, in percent of all bits of the original."""
    table = Table("occurrences of the rarest token", *files, title=f"{title}: bits beside the original's, %")
    sums = {name: sum(row["before"] for row in rows) for name, rows in files.items()}
    for number, least in enumerate(rare_tokens.LEAST):
        added = (100 * (rows[number]["after"] - rows[number]["before"]) / sums[name] for name, rows in files.items())
        table.add_row(f"{least} and more", *(f"{percent:+.1f}" for percent in added))
    Console().print(table)


def _print(rows: Mapping[str, Mapping[str, float]], files: "Mapping[str, list[AlignedText]]") -> None:
    table = Table("", *files, title="Bits per byte of held-out texts")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[file]:.4f}" for file in files))
    Console().print(table)


if __name__ == "__main__":
    process.entry("transfer", main)
