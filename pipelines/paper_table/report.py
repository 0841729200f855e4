"""The page of the paper's tables, from the cells computed so far."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.lib.learning import DEPTHS
from pipelines.paper_table import figures, pictures
from pipelines.paper_table.figures import Row
from pipelines.paper_table.methods import METHODS
from pipelines.paper_table.sweeps import PREFIX, SEPARATOR

PAGE, PICTURE = "paper_table.md", "speedup.png"

Cells = Mapping[str, Any]

LEGEND = (
    "After `+-` stands the standard error over questions. Acceptance: accepted share of all drafted tokens, siblings "
    "included (trees draft more than they hope to keep). Agreement: share of scored positions whose first candidate "
    "the target drew. Speed-up: seconds of plain decoding of our engine for as many tokens, over those of the method, "
    "the prompt's reading by target and drafter included; behind the first pass: the same without that pass; own "
    "engine: the speed-up over plain decoding of the method's engine. Merges: drafted from the n-gram cache, which are "
    "its hits, and accepted. Drafted: tokens by the way in which they were drafted."
)

OFFLINE = (
    "Share of the positions of the target's own answers to the test prompts where the drafter's first candidate is the "
    "emitted token, by the weights that serve; then the gain over the untrained drafter with its standard error, an "
    "answer being one draw. Nothing is decoded, so there is no noise of the clock. Merges count where "
    "the method's cache knows them, and the first pieces of splits in every row."
)

PREDICTED = (
    "Agreement as above; the gain over the drafter that the column names, on the same answers: its error tells whether "
    "the two differ; and tokens a pass that chains of first candidates would give, predicted from the agreement."
)

WARM = (
    "Decoded with chains of the paper's method, from a cache that began with every canonical n-gram and learned the "
    "train answers, cut to its capacity by each rule."
)


ADAPTIVE = (
    "Chains of the drafter model with splits and merges, without trees and memory, so that only their lengths differ. "
    "`static`: four tokens, untrained. `distill only`: four tokens after `dm + 0.2 ngram`, or as many as a policy "
    "without a head says. `interleaved`: drafter and acceptance head learn in turn, and a chain ends where a rejection "
    "in it is likelier than gamma."
)


def write(content: Mapping[str, Any], out: Path) -> None:
    """Write Markdown and PNG files into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    cells: Cells = content["cells"]
    table = {name: _rows(questions) for name, questions in _decoded_cells(cells, "table/").items()}
    if table:
        pictures.draw(table, out / PICTURE)
    lines = ["# The paper's tables", "", f"Options: `{content['options']}`.", ""]
    for made_by in content["made_by"]:
        lines += ["; ".join(f"{name} {value}" for name, value in made_by.items()), ""]
    lines += [*_methods(table), *_offline(_under(cells, "offline/"))]
    for pair, of_pair in _sweeps(cells).items():
        lines += _sweep(pair, of_pair)
    (out / PAGE).write_text("\n".join([*lines, ""]))


def _sweeps(cells: Cells) -> dict[str, dict[str, Any]]:
    """Return the cells of each target and task that were swept, by their names in the sweep."""
    found: dict[str, dict[str, Any]] = {}
    for key, cell in _under(cells, PREFIX).items():
        pair, _, name = key.rpartition(SEPARATOR)
        found.setdefault(pair, {})[name] = cell
    return found


def _sweep(pair: str, cells: Cells) -> Iterable[str]:
    """Yield the smaller tables of one target and task."""
    target, _, task = pair.rpartition("/")
    yield from ("", f"# Sweeps: {task}, {target}")
    yield from _learned("LoRA rank", "rank", "full weights", _under(cells, "lora/"))
    yield from _learned("Losses", "loss", "the form alone", _under(cells, "loss/"))
    if "cache" in cells:
        yield from ("", "## The n-gram cache", "", *_caches(cells["cache"]))
    yield from _decoded_section("Warm caches", WARM, "cache", _decoded_cells(cells, "warm-cache"))
    yield from _decoded_section("Adaptive drafting", ADAPTIVE, "policy", _decoded_cells(cells, "adaptive"))
    for name, questions in _decoded_cells(cells, "temperature/").items():
        yield from _decoded_section(f"Temperature {name}", "", "method", {name: questions})


def _under(cells: Cells, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): cell for name, cell in cells.items() if name.startswith(prefix)}


def _decoded_cells(cells: Cells, prefix: str) -> dict[str, list[figures.Answers]]:
    """Return the answered questions of each table below the prefix, in the order of the questions."""
    tables: dict[str, list[figures.Answers]] = {}
    found = _under(cells, prefix).items()
    for name, answers in sorted(found, key=lambda cell: int(cell[0].rpartition("/")[2])):
        tables.setdefault(name.rpartition("/")[0], []).append(answers)
    return tables


def _rows(questions: Sequence[figures.Answers]) -> dict[str, Row]:
    """Return a row for each way, in the order of the first question."""
    return figures.rows(questions, dict.fromkeys(name for answers in questions for name in answers))


def _methods(table: Mapping[str, Mapping[str, Row]]) -> list[str]:
    if not table:
        return []
    about = [f"- `{name}`: {method.about}." for name, method in METHODS.items()]
    lines = ["", "## Methods", "", LEGEND, "", *about, "", f"![Acceptance and speed-up]({PICTURE})", ""]
    for name, rows in table.items():
        target, _, task = name.rpartition("/")
        lines += [f"### {task}, {target}", "", *_decoded(rows, "method"), ""]
    return lines


def _offline(rows: Mapping[str, Mapping[str, Row]]) -> list[str]:
    methods = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [(name, *(_agreement(row.get(method)) for method in methods)) for name, row in rows.items()]
    head = ["## Agreement on the test answers", "", OFFLINE, ""]
    return [*head, *_markdown(("target and task", *methods), cells)] if methods else []


def _agreement(measured: Row | None) -> str:
    if measured is None:
        return "-"
    gain = _gain(measured["gain"], measured["gain_error"])
    return f"{measured['agreement']:.3f}" + (f" ({gain})" if gain else "")


def _gain(gain: float | None, error: float | None) -> str:
    return "" if gain is None or error is None else f"{gain:+.3f} +- {error:.3f}"


def _decoded_section(
    title: str, about: str, first: str, tables: Mapping[str, Sequence[figures.Answers]]
) -> Iterable[str]:
    for questions in tables.values():
        yield from ("", f"## {title}", "", *([about, ""] if about else []), *_decoded(_rows(questions), first))


def _decoded(rows: Mapping[str, Row], first: str) -> list[str]:
    headings = (
        "acceptance",
        "agreement",
        "tokens per pass",
        "speed-up",
        "behind the first pass",
        "own engine",
        "merges",
        "drafted",
    )
    table = _markdown(
        (first, *headings, "texts as plain"),
        [
            (
                name,
                *(_with_error(row, field, "x" if field.endswith("speedup") else "") for field in figures.FIGURES),
                _merges(row),
                ", ".join(f"{num} {source}" for source, num in sorted(row["drafted_by_source"].items())) or "-",
                f"{row['same_texts']} of {row['num_texts']}",
            )
            for name, row in rows.items()
        ],
    )
    failures = [f"- {name} failed: {reason}" for name, row in rows.items() for reason in row["failures"]]
    return [*table, "", *failures] if failures else table


def _merges(row: Row) -> str:
    drafted = row["drafted_by_source"].get("merge", 0)
    return f"{drafted}, {row['accepted_by_source'].get('merge', 0)} accepted" if drafted else "-"


def _learned(title: str, first: str, reference: str, rows: Mapping[str, Row]) -> list[str]:
    if not rows:
        return []
    table = _markdown(
        (first, "agreement", f"over {reference}", *(f"chain of {depth}" for depth in DEPTHS)),
        [
            (
                name,
                _agreement(row),
                _gain(row.get("paired_gain"), row.get("paired_gain_error")) or "-",
                *(_number(row["tokens_per_pass"][str(depth)]) for depth in DEPTHS),
            )
            for name, row in rows.items()
        ],
    )
    return ["", f"## {title}", "", PREDICTED, "", *table]


def _caches(rows: Mapping[str, Row]) -> list[str]:
    return _markdown(
        ("cache", "entries", "bytes an entry", "kB", "hit rate", "of n-grams", "lookup, us", "agreement", "chain of 8"),
        [
            (
                name,
                str(row["entries"]),
                str(row["bytes_per_entry"]),
                f"{row['bytes'] / 1000:.1f}",
                _number(row["hit_rate"]),
                str(row["num_ngrams"]),
                _number(row["lookup_us"]),
                _agreement(row),
                _number(row["tokens_per_pass"]["8"]),
            )
            for name, row in rows.items()
        ],
    )


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _with_error(row: Row, field: str, unit: str) -> str:
    error = row[f"{field}_error"]
    return _number(row[field], unit) + ("" if error is None or row[field] is None else f" +- {error:.2f}")


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
