"""The tables of the OmniDraft paper (arXiv 2507.02659) for one's own targets, by `omnidraft replay` and the benchmark.

`python -m pipelines.paper_table --targets qwen2.5-coder-0.5b --tasks gsm8k,code`. A row is what a drafter learns of the
target's own answers to a task's train prompts, and how it drafts for the test prompts. Each step is a command, whose
file in `--out` is made once: an interrupted run goes on with the next step.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.cli.choices import chosen
from omnidraft.cli.replay import AS_SET
from omnidraft.errors import ConfigError, RequestError
from omnidraft.files import save_json
from omnidraft.hosts import process
from omnidraft.snapshots import bundle
from omnidraft.stats import Ratio
from pipelines.bench.methods import HUGGINGFACE
from pipelines.lib.page import PageSection, markdown
from pipelines.lib.recording import rows_of_split

Sections = dict[str, Any]
Figures = dict[str, Any]

CHAINS: Sections = {"suffix_memory": False, "lookup": False, "trees": False}
"""Section `decode` of adaptive drafting: a model's chains alone, so that only their lengths differ."""
CHAIN: Sections = {**CHAINS, "policy": "fixed", "num_draft_tokens": 4, "splits": False}
"""That of the paper's drafting: chains of tokens that both vocabularies have."""
DM = "dm_paper"
PAPER: Sections = {"loss": f"{DM} + 0.2 ngram"}
OURS: Sections = {"loss": "dm + 0.2 ngram"}
CACHE_ALONE: Sections = {"learning_rate": 1e-30}
"""Section `learner` of what leaves the weights as they are, while the n-gram cache learns."""
HELD_OUT_EVERY = 4
HEADINGS = ("row", "held-out agreement", "agreement", "tokens per pass", "speed-up", "as plain")


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter, and what it drafts with."""

    learner: Sections | None = None
    """The section that it learns with; None: it learns nothing beforehand."""
    cache: Sections = field(default_factory=lambda: {"mode": "online"})
    decode: Sections | None = field(default_factory=lambda: CHAIN)
    """None: nothing is decoded, and held-out answers judge alone."""
    temperature: float = 0.0
    methods: Sequence[str] = ("omnidraft",)
    """Methods of `pipelines.bench` beside plain decoding."""


METHODS: Mapping[str, Row] = {
    "spd-dm": Row(cache={"mode": "off"}),
    "ngram-pp": Row(CACHE_ALONE),
    "dm": Row({"loss": DM}, cache={"mode": "off"}),
    "dm+ngram": Row(PAPER),
    "dm+ngram-lora": Row(PAPER | {"train": "lora"}),
    "transformers": Row(decode={}, methods=HUGGINGFACE),
    "ours-untrained": Row(CACHE_ALONE, decode={}),
    "ours": Row(OURS, decode={}),
    "alm": Row({"loss": "dm + 0.3 alm"}, decode={}),
}
ADAPTIVE: Mapping[str, Row] = {
    "static": Row(CACHE_ALONE, decode=CHAINS | {"policy": "fixed", "num_draft_tokens": 4}),
    "untrained, cost": Row(CACHE_ALONE, decode=CHAINS | {"policy": "cost"}),
    "distill only": Row(OURS, decode=CHAINS | {"policy": "fixed", "num_draft_tokens": 4}),
    "distill only, threshold": Row(OURS, decode=CHAINS | {"policy": "threshold"}),
    "distill only, cost": Row(OURS, decode=CHAINS | {"policy": "cost"}),
    "interleaved": Row(OURS, decode=CHAINS | {"policy": "acceptance"}),
}
LOSSES = (DM, "dm", "nll", *(f"{DM} + {weight:g} ngram" for weight in (0.1, 0.2, 0.5, 1.0)), "dm + 0.2 ngram")
TABLES: Mapping[str, Mapping[str, Row]] = {
    "methods": METHODS,
    "adaptive": ADAPTIVE,
    "lora": {
        "full": Row({}, decode=None),
        **{f"rank {rank}": Row({"train": "lora", "lora_rank": rank}, decode=None) for rank in (8, 16, 32, 64, 128)},
    },
    "loss": {loss: Row({"loss": loss}, decode=None) for loss in LOSSES},
    "cache": {
        f"{capacity} entries": Row(PAPER, {"mode": "online", "capacity": capacity}) for capacity in (16, 256, 4096)
    },
    "temperature": {
        f"{name}, T = {temperature:g}": replace(METHODS[name], temperature=temperature)
        for temperature in (0.01, 1.0)
        for name in ("spd-dm", "dm+ngram", "ours")
    },
}
"""The paper's Tables 1, 2 and 11, 6 (LoRA, losses, temperatures) and 5."""


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Cell:
    """One target and task, whose files lie in one folder."""

    target: str
    prompts: Path
    drafter: str | None
    folder: Path
    num_train: int
    num_test: int
    max_new_tokens: int

    def figures(self, row: Row) -> dict[str, Figures]:
        """Return the figures of a row by its methods; what is missing for them is made."""
        snapshot = None if row.learner is None else self._snapshot(row)
        learned = _agreement(snapshot) if snapshot else {}
        if row.decode is None:
            return {"": learned}
        runs = self._bench(row, snapshot)
        return {method: learned | _decoded(runs, method) for method in row.methods}

    def _snapshot(self, row: Row) -> Path:
        """Return the folder of what was learned; rows that learn alike share it."""
        trains_head = (row.decode or {}).get("policy") == "acceptance"
        decode = {"decode": {"policy": "acceptance"}} if trains_head else {}
        registry = {"url": f"directory:///{self.folder.absolute()}/registry"}
        settings = self._settings(learner=row.learner or {}, cache=row.cache, registry=registry, **decode)
        out, curve = settings.with_suffix(".snapshots"), settings.with_suffix(".json")
        if not curve.exists():
            shutil.rmtree(out, ignore_errors=True)
            options = ("--log", self._answers(), "--held-out-every", HELD_OUT_EVERY, "--snapshots", out)
            self._run("omnidraft.cli replay", curve, *options, "--config", settings, output="--json")
        return out / AS_SET

    def _answers(self) -> Path:
        """Return an archive of the target's own answers to the train prompts."""
        archive = self.folder / "train.avro"
        options = ("--prompts", self.prompts, "--split", "train", "--num-prompts", self.num_train)
        if not archive.exists():
            limit = ("--max-new-tokens", self.max_new_tokens)
            self._run("pipelines.record", archive, *options, *limit, output="--out")
        return archive

    def _bench(self, row: Row, snapshot: Path | None) -> list[Figures]:
        """Return the answers of plain decoding and of the row's methods, which took turns."""
        settings = self._settings(decode=row.decode or {}, cache=row.cache)
        asked = (row.temperature, row.methods, snapshot and snapshot.name)
        measured = settings.with_name(f"{settings.stem}-{_digest(asked)}.bench.json")
        if not measured.exists():
            options: list[object] = ["--prompts", self.prompts, "--num-prompts", self.num_test]
            options += ["--max-new-tokens", self.max_new_tokens, "--temperature", row.temperature]
            options += ["--methods", ",".join(("plain", *row.methods))]
            options += [] if snapshot is None else ["--snapshot", snapshot]
            self._run("pipelines.bench", measured, *options, "--config", settings, output="--json")
        return list(json.loads(measured.read_text())["runs"])

    def _settings(self, **sections: Sections) -> Path:
        """Return a settings file that is named by its content."""
        lines = [
            line
            for name, section in sections.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items()))
        ]
        path = self.folder / f"{_digest(lines)}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _run(self, name: str, made: Path, *options: object, output: str) -> None:
        """Run a command, whose file takes its name when it is whole. Raises RequestError when it fails."""
        partial = made.with_name(f"partial-{made.name}")
        models = ["--target", self.target, *(["--drafter", self.drafter] if self.drafter else [])]
        command = [sys.executable, "-m", *name.split(), *models, *map(str, options), output, str(partial)]
        if failed := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise RequestError(f"{name} ended with exit code {failed}; try again to go on from here")
        partial.rename(made)


def main(
    targets: Annotated[str, typer.Option(help="With commas.")] = "qwen2.5-coder-0.5b",
    tasks: Annotated[str, typer.Option(help="Names of prompt files in --data, with commas.")] = "gsm8k,code",
    tables: Annotated[
        str, typer.Option(help=f"Some of {', '.join(TABLES)}, with commas; all but methods for the first pair.")
    ] = ",".join(TABLES),
    rows: Annotated[str | None, typer.Option(help="Rows of these names alone, with commas.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of JSON lines with prompt and split.")] = Path("../shared/data"),
    drafter: Annotated[str | None, typer.Option()] = None,
    num_train: Annotated[int, typer.Option(min=2, help="Answers of each task to learn from.")] = 24,
    num_test: Annotated[int, typer.Option(min=1, help="Prompts of each task that are decoded.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    out: Annotated[Path, typer.Option(help="Folder of all files.")] = Path("runs/paper_table"),
) -> None:
    """Reproduce the paper's tables in shape."""
    named = chosen(tables, TABLES, "table")
    known = [name for table in named for name in TABLES[table]]
    wanted = chosen(rows, known, "row") if rows else known
    paths = {task: data / f"{task}.jsonl" for task in chosen(tasks)}
    asked = [
        (rows_of_split(path, num_train, "train"), rows_of_split(path, num_test, "test")) for path in paths.values()
    ]
    _require_alike(out, {"drafter": drafter, "max_new_tokens": max_new_tokens, "rows": _digest(asked)})
    pairs = [(target, task) for target in chosen(targets) for task in paths]
    content: dict[str, dict[str, Figures]] = {}
    for table in named:
        for target, task in pairs if table == "methods" else pairs[:1]:
            folder = out / f"{Path(target).name}-{_digest(target)[:4]}-{task}"
            folder.mkdir(exist_ok=True)
            cell = Cell(target, paths[task], drafter, folder, num_train, num_test, max_new_tokens)
            lines = content.setdefault(f"{table}: {task}, {target}", {})
            for name in [name for name in TABLES[table] if name in wanted]:
                for method, figures in cell.figures(TABLES[table][name]).items():
                    lines[name if method in ("", "omnidraft") else method] = figures
                save_json(content, out / "paper_table.json")
                (out / "paper_table.md").write_text(page(content))
    print(page(content))


def _require_alike(out: Path, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where the files of the folder were made with other options."""
    path = out / "options.json"
    if path.exists() and json.loads(path.read_text()) != options:
        raise ConfigError(f"{out} was made with other options or prompts; name another --out, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(options))


def _agreement(snapshot: Path) -> Figures:
    """Return agreement on held-out answers after learning, without the n-gram cache, and the gain with its error."""
    manifest = bundle.read_manifest(snapshot)
    before, after = manifest.agreement_before or 0.0, manifest.agreement_after or 0.0
    return {"held_out": after, "gain": after - before, "gain_error": manifest.agreement_change_error}


def _decoded(runs: Iterable[Figures], method: str) -> Figures:
    """Return ratios of sums over the questions, with their errors, of a method beside plain decoding."""
    by_method: dict[str, dict[int, Figures]] = {}
    for run in runs:
        whole_s = run.get("first_token_s", 0.0) + run.get("decode_s", 0.0)  # with the reading of the prompt
        by_method.setdefault(run["method"], {})[run["prompt"]] = run | {"whole_s": whole_s}
    plain = by_method["plain"]
    done = {number: run for number, run in by_method[method].items() if "failure" not in run}
    pairs = {
        "agreement": [(run["num_agreed"], run["num_scored"]) for run in done.values()],
        "tokens_per_pass": [(run["num_tokens"], run["num_passes"]) for run in done.values()],
        "speedup": [
            (plain[number]["whole_s"] / plain[number]["num_tokens"] * run["num_tokens"], run["whole_s"])
            for number, run in done.items()
        ],
    }
    same = sum(run["ids"] == plain[number]["ids"] for number, run in done.items())
    return {key: _ratio(each) for key, each in pairs.items()} | {"same_texts": same, "num_texts": len(done)}


def _ratio(pairs: Sequence[tuple[float, float]]) -> list[float | None] | None:
    """Return a ratio and its error, where there are any."""
    ratio = Ratio()
    for upper, lower in pairs:
        ratio.add(upper, lower)
    return [ratio.estimate, ratio.error if isfinite(ratio.error) else None] if ratio.x else None


def page(content: Mapping[str, Mapping[str, Figures]]) -> str:
    """Return the tables in Markdown."""
    about = f"Speed-ups are of whole answers; one in {HELD_OUT_EVERY} answers is held out."
    sections = [PageSection(title, HEADINGS, [_cells(*row) for row in rows.items()]) for title, rows in content.items()]
    return markdown("The paper's tables", [about], sections)


def _cells(name: str, row: Figures) -> list[str]:
    gain = (row["gain"], row["gain_error"]) if "gain" in row else None
    held_out = "-" if gain is None else f"{row['held_out']:.3f} ({_shown(gain, 3, '+')})"
    figures = [_shown(row.get(key), 2) for key in ("agreement", "tokens_per_pass", "speedup")]
    same = f"{row['same_texts']} of {row['num_texts']}" if "num_texts" in row else "-"
    return [name, held_out, *figures, same]


def _shown(figure: Sequence[float | None] | None, digits: int, sign: str = "") -> str:
    if figure is None:
        return "-"
    value, error = figure
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" +- {error:.{digits}f}")


if __name__ == "__main__":
    process.entry("paper_table", main)
