"""What number formats cost in quality: our packed16, int8 and int4 beside llama.cpp's of the same 16-bit weights.

`python -m pipelines.bench.quality --prompts FILE --json OUT`; OUT is written after every row.

perplexity       of the file's prompts and answers, in parts of 512 tokens
perplexity_ratio to that of the 16-bit model
best_equal       share of these tokens' places where the likeliest token is that of the 16-bit model
greedy_equal     share of the tokens of the 16-bit model's greedy answers that are the likeliest here too, after the
                 same text
bits_per_weight  of the matrices that a pass reads

Fields that end with `_error` are standard errors. The rows of the 16-bit model itself come first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock
from rich import box
from rich.console import Console
from rich.table import Table

from omnidraft import prompts
from omnidraft.demo.recorded import QUESTIONS
from omnidraft.durable_files import replaced_file
from omnidraft.hosts import process
from omnidraft.models.catalog import store
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.models.native.library import PACKED
from omnidraft.models.probe.choice import PORTABLE
from pipelines.bench.engines.engine import EngineSpec
from pipelines.bench.engines.engine_process import LLAMACPP, llamacpp_file
from pipelines.bench.quality import texts
from pipelines.bench.quality.measurement import QualityMeasurement, Row
from pipelines.bench.quality.permuted_gguf import write_permuted
from pipelines.lib import machine, report
from pipelines.lib.choices import chosen

SYSTEMS = ("torch", "omnidraft", LLAMACPP)
GGUF_FORMATS = "Q8_0,Q4_K_M"
REFERENCE = "packed16"
SHARES = ("perplexity_ratio", "best_equal", "greedy_equal")
COLUMNS = ("system", "format", "variant", "text", "perplexity", *SHARES, "bits_per_weight")


def main(
    prompts_paths: Annotated[
        list[Path] | None, typer.Option("--prompts", help="JSON lines with prompt and reference; may be given again.")
    ] = None,
    target: Annotated[str, typer.Option()] = "qwen2.5-coder-1.5b",
    systems: Annotated[str, typer.Option(help=f"Some of {', '.join(SYSTEMS)}, with commas.")] = ",".join(SYSTEMS),
    formats: Annotated[str, typer.Option(help="Number formats of our kernels, with commas.")] = ",".join(PACKED),
    variants: Annotated[str, typer.Option(help="Builds of our kernels, with commas.")] = PORTABLE,
    torch_formats: Annotated[str, typer.Option(help="float32, bfloat16 or both, with commas.")] = "float32",
    gguf_formats: Annotated[str, typer.Option(help="Formats of llama.cpp, with commas.")] = GGUF_FORMATS,
    permute: Annotated[
        bool, typer.Option(help="Put channels in another order: the catalog's weights lie on the grid of their file.")
    ] = True,
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each file for perplexity.")] = 4096,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each file for greedy answers.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=1)] = 96,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the rows.")] = None,
) -> None:
    """Compare the quality of number formats.

    \b
    python -m pipelines.bench.quality --prompts gsm8k.jsonl --prompts code.jsonl --json runs/quality.json
    """
    named = chosen(systems, SYSTEMS, "system")
    for path in prompts_paths or []:
        prompts.read(path, num_prompts)  # a wrong file is told before gigabytes are converted
    model, gguf = _models(target, permute=permute, with_gguf=LLAMACPP in named)
    ours = [(name, variant) for name in chosen(formats, PACKED, "format") for variant in chosen(variants)]
    specs = {
        "torch": [EngineSpec("torch", name, "onednn", model) for name in chosen(torch_formats)],
        "omnidraft": [EngineSpec("omnidraft", name, variant, model) for name, variant in ours],
        LLAMACPP: [EngineSpec(LLAMACPP, name, "without AMX", gguf) for name in chosen(gguf_formats)],
    }
    tokenizer = load_tokenizer(Path(model))
    read = [
        texts.read(path, tokenizer, num_tokens=num_tokens, num_prompts=num_prompts)
        for path in prompts_paths or [QUESTIONS]
    ]
    about = {
        "machine": machine.describe(),
        "options": {
            "command": machine.command("pipelines.bench.quality"),
            "target": target,
        },
    }

    def publish(so_far: Sequence[Row]) -> None:
        if json_path is not None:
            report.save({**about, "rows": list(so_far)}, json_path)

    measurement = QualityMeasurement(read, answer_tokens, publish)
    reference = EngineSpec("omnidraft", REFERENCE, PORTABLE, model)
    measurement.measure(reference, [spec for system in named for spec in specs[system]])
    _show(measurement.rows)


def _models(target: str, *, permute: bool, with_gguf: bool) -> tuple[str, str]:
    """Return the folder of the 16-bit model, and the GGUF file of the same weights."""
    if not permute:
        return str(store.resolve(target)), str(store.gguf_path(target)) if with_gguf else ""
    permuted = _permuted_file(store.gguf_path(target), store.default_home())
    return str(store.resolve(str(permuted))), str(permuted)


def _permuted_file(gguf: Path, home: Path) -> Path:
    """Return the file's model with its channels in another order, made below `home` the first time."""
    permuted = home / "llama-cpp-python" / "models" / f"{gguf.stem}-{gguf.stat().st_size}-permuted.gguf"
    permuted.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(permuted.with_name(f".{permuted.name}.lock")):
        if not permuted.exists():
            sixteen_bits = llamacpp_file(gguf, "BF16", home)
            with replaced_file(permuted) as file:
                write_permuted(sixteen_bits, Path(file.name))
            sixteen_bits.unlink()
    return permuted


def _show(rows: Sequence[Row]) -> None:
    table = Table(*COLUMNS, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        if row["error"]:
            print(f"{row['system']} {row['format']} {row['variant']}: {row['error']}")
        else:
            shares = (f"{row[name]:.4f} ± {row[f'{name}_error']:.4f}" for name in SHARES)
            perplexity, bits = f"{row['perplexity']:.4f}", f"{row['bits_per_weight']:.2f}"
            table.add_row(*(row[name] for name in COLUMNS[:4]), perplexity, *shares, bits)
    Console().print(table)


if __name__ == "__main__":
    process.entry("quality", main)
