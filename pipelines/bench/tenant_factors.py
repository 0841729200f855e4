"""Costs of tenants' low-rank factors: memory for many tenants, and a drafter step of texts with factors of their own.

`python -m pipelines.bench.tenant_factors --json OUT`. Random weights of SmolLM2-135M's shapes: nothing is downloaded.

none       texts without factors, in one pass
unmerged   each text with factors of its own, in one pass over the shared weights
merged     each text with a copy of the drafter of its own, into which its factors are merged: a pass for each
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.files import save_json
from omnidraft.hosts import process
from pipelines.lib import machine
from pipelines.lib.choices import numbers

if TYPE_CHECKING:
    import torch

    from omnidraft.models.kv_session import BranchingSession
    from omnidraft.models.native.drafter import LlamaDrafter

SMOLLM2_135M: Mapping[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_CONTEXT = 200
"""Ids of a text before the steps that are timed."""
_MIB = 2**20

Step = Callable[[], object]


def main(
    ranks: Annotated[str, typer.Option(help="Ranks of factors, with commas.")] = "8,16,32",
    texts: Annotated[str, typer.Option(help="Numbers of texts in a step, with commas.")] = "1,4,8",
    tenants: Annotated[int, typer.Option(min=1, help="Tenants whose factors are held in memory.")] = 100,
    precision: Annotated[str, typer.Option(help="The drafter's.")] = "int8",
    repeats: Annotated[int, typer.Option(min=3, help="Steps of each kind, in turn.")] = 30,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    shape: Annotated[str, typer.Option(help="JSON: sizes that differ from SmolLM2-135M's.")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Measure memory and steps, and print them."""
    import json

    import torch

    all_ranks, sizes = numbers(ranks, "--ranks"), numbers(texts, "--texts")
    if threads is not None:
        torch.set_num_threads(threads)
    bench = Bench(SMOLLM2_135M | json.loads(shape), precision)
    memory = [bench.memory(rank, tenants) for rank in all_ranks]
    steps = [row for rank in all_ranks for row in bench.steps(rank, sizes, repeats)]
    for row in [{"copy_mib": bench.copy_mib}, *memory, *steps]:
        typer.echo(json.dumps(row))
    if json_path is not None:
        about = machine.made_by("pipelines.bench.tenant_factors") | {"copy_mib": bench.copy_mib}
        save_json({**about, "memory": memory, "steps": steps}, json_path)


class Bench:
    """One drafter, and others that are copies of it."""

    def __init__(self, shape: Mapping[str, Any], precision: str) -> None:
        from omnidraft.testing.tiny_models import random_llama

        self._model = random_llama(dict(shape))
        self._precision = precision
        before = _resident_mib()
        self._shared = self._copy()
        self.copy_mib = round(_resident_mib() - before, 1)
        """The memory of a drafter of one's own."""
        self._copies: list[LlamaDrafter] = []

    def memory(self, rank: int, num_tenants: int) -> dict[str, Any]:
        """Return the resident memory that the factors of so many tenants take."""
        self._shared.with_factors(self._factors(rank, seed=0))  # what only the first one allocates
        before = _resident_mib()
        held = [self._shared.with_factors(self._factors(rank, seed)) for seed in range(num_tenants)]
        mib = _resident_mib() - before
        return {"rank": rank, "tenants": len(held), "mib": round(mib, 1), "mib_of_a_tenant": round(mib / len(held), 2)}

    def steps(self, rank: int, numbers: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
        """Yield the median seconds of a step over so many texts, one row each, in each way."""
        while len(self._copies) < max(numbers):
            self._copies.append(self._copy())
        openers = [self._shared.with_factors(self._factors(rank, seed)) for seed in range(max(numbers))]
        for number in numbers:
            ways: dict[str, Step] = {
                "none": _together(self._shared, [self._shared.open() for _ in range(number)]),
                "unmerged": _together(self._shared, [opener() for opener in openers[:number]]),
                "merged": _apart([(copy, copy.open()) for copy in self._copies[:number]]),
            }
            seconds = _median_seconds(ways, repeats)
            yield {"rank": rank, "texts": number} | {
                f"{name}_ms": round(1e3 * each, 3) for name, each in seconds.items()
            }

    def _copy(self) -> "LlamaDrafter":
        from omnidraft.models.native.drafter import LlamaDrafter

        return LlamaDrafter(self._model, self._precision)

    def _factors(self, rank: int, seed: int) -> "dict[str, torch.Tensor]":
        import torch

        from omnidraft.snapshots.low_rank import A, B

        generator, factors = torch.Generator().manual_seed(seed), {}
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                a_RK = torch.randn(rank, module.in_features, generator=generator) / module.in_features
                factors[name + A] = a_RK.to(torch.bfloat16)
                factors[name + B] = torch.randn(module.out_features, rank, generator=generator).to(torch.bfloat16)
        return factors


def _together(drafter: "LlamaDrafter", sessions: "Sequence[BranchingSession]") -> Step:
    """Return a step over all these texts in one pass."""
    drafter.prefill_or_extend_all([(each, 0, [1] * _CONTEXT) for each in sessions])
    return lambda: drafter.prefill_or_extend_all([(each, _CONTEXT, [2]) for each in sessions])


def _apart(texts: "Sequence[tuple[LlamaDrafter, BranchingSession]]") -> Step:
    """Return a step over all these texts, each in a pass of its own drafter."""
    steps = [_together(drafter, [session]) for drafter, session in texts]
    return lambda: [step() for step in steps]


def _median_seconds(ways: Mapping[str, Step], repeats: int) -> dict[str, float]:
    """Time the ways in turn, each once unmeasured before."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, step in ways.items():
            started = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _resident_mib() -> float:
    """Return the memory of this process, without what it has freed and the allocator still holds."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / _MIB


if __name__ == "__main__":
    process.entry("tenant_factors", main)
