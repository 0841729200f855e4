"""How long a pass takes, for every number format and build of our kernels, beside torch on this machine.

`python -m pipelines.bench.kernels --json OUT --markdown PAGE`. Every engine is a process of its own, so one that dies
on this processor costs its rows only; as many as memory holds take turns. OUT is written after every row.

omnidraft      our kernels, each format in each build that the compiler makes
torch          transformers' own pass in float32 and bfloat16
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from omnidraft.cli.choices import chosen, numbers
from omnidraft.files import save_json
from omnidraft.hosts import process
from omnidraft.models.catalog import store
from omnidraft.models.native.build import VARIANTS
from omnidraft.models.native.library import PACKED
from pipelines.bench.kernels import page
from pipelines.bench.kernels.engine import EngineSpec
from pipelines.bench.kernels.measurement import KernelPlan, Row, machine_limits, measure
from pipelines.lib import machine

SYSTEMS = ("omnidraft", "torch")
TORCH_FORMATS = ("float32", "bfloat16")
_HEADROOM = 2.5
"""Free memory that loading another engine needs, as a multiple of the model's folder: float32 has twice its size."""


def main(
    target: Annotated[str, typer.Option()] = "qwen2.5-coder-1.5b",
    systems: Annotated[str, typer.Option(help=f"Some of {', '.join(SYSTEMS)}, with commas.")] = ",".join(SYSTEMS),
    formats: Annotated[str, typer.Option(help="Number formats of our kernels, with commas.")] = ",".join(PACKED),
    variants: Annotated[str, typer.Option(help="Builds of our kernels, with commas.")] = ",".join(VARIANTS),
    rows: Annotated[
        str, typer.Option(help="Rows of a pass, with commas; above 64: tokens of a prompt.")
    ] = "1,2,4,8,16,32,64,1000",
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each engine and number of rows.")] = 5,
    limits: Annotated[bool, typer.Option(help="Measure memory and arithmetic alone too.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the rows.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="A page, and a picture beside it.")] = None,
) -> None:
    """Compare the passes of engines.

    \b
    python -m pipelines.bench.kernels --json runs/kernels.json --markdown runs/kernels.md
    python -m pipelines.bench.kernels --systems omnidraft --formats int8 --rows 1,8 --target qwen2.5-coder-0.5b
    """
    nums_rows = numbers(rows, "--rows")
    named, ours = chosen(systems, SYSTEMS, "system"), chosen(formats, PACKED, "format")
    specs = _specs(named, ours, chosen(variants), target)
    about = {
        "machine": machine.describe(),
        "limits": machine_limits() if limits else {},
        "options": {"command": machine.command("pipelines.bench.kernels"), "target": target},
    }

    plan, measured = KernelPlan(nums_rows, repeats, int(_HEADROOM * _folder_bytes(target))), list[Row]()
    for row in measure(specs, plan):
        measured.append(row)
        if json_path is not None:
            save_json({**about, "rows": measured}, json_path)
    page.show({**about, "rows": measured}, markdown_path)


def _specs(systems: Sequence[str], formats: Sequence[str], variants: Sequence[str], target: str) -> list[EngineSpec]:
    named = {
        "omnidraft": [(name, variant) for name in formats for variant in variants],
        "torch": [(name, "onednn") for name in TORCH_FORMATS],
    }
    return [EngineSpec(system, *each, target) for system in systems for each in named[system]]


def _folder_bytes(target: str) -> int:
    return sum(file.stat().st_size for file in store.resolve(target).glob("*.safetensors"))


if __name__ == "__main__":
    process.entry("kernels", main)
