"""Choose the implementations of this process: those that survived a trial on this processor with correct numbers.

Every path to a model comes here before its first product: the loaders of targets, drafters and learners, and so the
command line, the services, Ray's actors, the pipelines and vLLM's host.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from omnidraft.errors import KernelsUnavailable, ModelError
from omnidraft.models.native.build import VARIANTS, find_compiler, is_announced
from omnidraft.models.native.library import open_library
from omnidraft.models.native.wheel_libraries import is_in_wheel, kernel_library
from omnidraft.models.probe.subprocess_trial import Outcome, run_once
from omnidraft.system import default_home

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Limits the instructions of oneDNN, which multiplies torch's matrices. Read at its first product."""
_ISA_LIMITS = (None, "AVX512_CORE_BF16", "AVX2")
"""Values of that variable in the order of speed. AVX512_CORE_BF16 excludes AMX."""
SIXTEEN_BITS = {"bfloat16"}
"""Formats of torch that keep as much of every weight as packed16 does."""
NO_KERNELS, PORTABLE = "torch", "portable"
"""Settings: without our kernels; with bits that are the same on every processor in every format."""
NOT_PORTABLE = {"amx", "avx512_bf16"}
"""Variants whose bits in packed16 are not those of the others."""
_TIMING_NOISE = 0.1
"""Relative difference of two measured times that is not significant."""
_RETRY_S = 3600.0
"""A trial of our kernels that could not run is not repeated for so long: without them a start goes on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchProducts:
    """The limits and trials of torch's matrix products here."""

    isa: str | None
    """The instructions that oneDNN is limited to; None: no limit."""
    outcome: Outcome
    refused: tuple[tuple[str, str], ...]
    """Wider instructions that were tried before, each with its problem."""

    def require(self, precision: str) -> None:
        """Raise ModelError unless products of this format are correct."""
        if precision not in self.outcome.seconds:
            reason = self.outcome.fault or "no answer"
            raise ModelError(f"torch cannot multiply matrices in {precision} on this processor: {reason}")


@dataclass(frozen=True, slots=True)
class Kernels:
    """A build of our kernels that works here."""

    variant: str
    library: Path
    seconds_per_token: Mapping[str, float]
    """Times of packed16 and of torch's 16-bit formats, on layers of a real model's size."""
    refused: tuple[tuple[str, str], ...] = ()
    """Variants that do not work here although the processor announces their instructions, each with its problem."""


def torch_products() -> TorchProducts:
    """Try torch's products and limit oneDNN in this process to instructions that work; the first call decides.

    A limit that ONEDNN_MAX_CPU_ISA sets already stays.

    Raises:
        ModelError: the trial itself could not run.
    """
    return _torch_products(default_home())


@cache
def _torch_products(home: Path) -> TorchProducts:
    preset = os.environ.get(ISA_VARIABLE)
    tried = []
    for isa in (preset,) if preset else _ISA_LIMITS:
        tried.append((isa, _try_torch(home, isa)))
        if tried[-1][1].fault is None:
            break
    best = max(range(len(tried)), key=lambda at: len(tried[at][1].seconds))  # among equals the first: the fastest
    isa, outcome = tried[best]
    refused = tuple((str(wider or "all instructions"), each.fault or "") for wider, each in tried[:best])
    if isa is not None and not preset:
        os.environ[ISA_VARIABLE] = isa
        logger.warning(
            "torch's matrix products %s; here oneDNN is kept to %s (%s), which is slower",
            refusals(refused, "with "),
            isa,
            ISA_VARIABLE,
        )
    elif outcome.fault:
        logger.warning("torch's matrix products on this processor: %s", outcome.fault)
    return TorchProducts(isa, outcome, refused)


def _try_torch(home: Path, isa: str | None) -> Outcome:
    return run_once(
        (sys.executable, "-m", "omnidraft.models.probe.torch_products"),
        name=f"torch's matrix products with {isa or 'all instructions'}",
        home=home,
        depends_on=(torch.__version__,),
        environ=_threads() | ({ISA_VARIABLE: isa} if isa else {}),
    )


def _threads() -> dict[str, str]:
    """Return the variable by which a trial computes on as many threads as this process."""
    return {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def training_seconds() -> Mapping[str, float]:
    """Return the time of a training step's products in each format that torch multiplies correctly here.

    Raises:
        ModelError: the trial itself could not run.
    """
    return _training_seconds(default_home(), tuple(sorted(torch_products().outcome.seconds)))


@cache
def _training_seconds(home: Path, formats: tuple[str, ...]) -> Mapping[str, float]:
    return run_once(
        (sys.executable, "-m", "omnidraft.models.probe.torch_products", *formats),
        name="the products of a training step",
        home=home,
        depends_on=_torch_as_it_is(),
    ).seconds


def kernels(variant: str = "auto") -> Kernels:
    """Return the build of our kernels to use, compiled and tried if that was not done yet.

    Args:
        variant: a name of VARIANTS must work; `auto` takes the widest instructions that work and are faster than
            torch, or else the fastest that work, and `portable` does so among those whose bits are the same on every
            processor.

    Raises:
        KernelsUnavailable: none works here, none can be compiled or tried, or `variant` is `torch`, which asks for
            none.
    """
    if variant == NO_KERNELS:
        raise KernelsUnavailable(f"models.kernels = '{NO_KERNELS}' asks for no kernels of ours")
    formats = SIXTEEN_BITS & torch_products().outcome.seconds.keys()
    found, refused = _usable_kernels(default_home(), variant, tuple(formats), os.environ.get("CXX"))
    if not found:
        raise KernelsUnavailable(f"our kernels do not work here: {refusals(refused, 'compiled for ')}")
    times = {name: _relative_time(each.seconds_per_token) for name, each in found.items()}
    return replace(found[next(near_fastest(times))], refused=refused)


@cache
def _usable_kernels(
    home: Path, variant: str, formats: tuple[str, ...], _compiler: str | None
) -> tuple[Mapping[str, Kernels], tuple[tuple[str, str], ...]]:
    """Return the builds that work, and the variants that do not, each with its problem; the first call decides."""
    candidates = _candidates(variant)
    if not any(map(is_in_wheel, candidates)):
        find_compiler()
    found: dict[str, Kernels] = {}
    refused: list[tuple[str, str]] = []
    for name in candidates:
        try:
            found[name] = _usable(home, name, formats)
        except ModelError as exc:  # KernelsUnavailable, or the trial could not run
            refused.append((name, str(exc)))
            continue
        if _is_faster_than_torch(found[name].seconds_per_token):
            break  # narrower instructions would cost the first start a compilation and a trial each
    if found and refused:
        logger.warning("our kernels: %s", refusals(refused, "compiled for "))
    return found, tuple(refused)


def _usable(home: Path, variant: str, formats: tuple[str, ...]) -> Kernels:
    """Return this build of our kernels. Raises ModelError unless it can be opened and is sound."""
    library = kernel_library(variant, home / "native")
    open_library(library)  # before the trial, which ends in vain where the system refuses the library to this process
    outcome = run_once(
        (sys.executable, "-m", "omnidraft.models.probe.kernel_passes", str(library.resolve()), *formats),
        name=f"our kernels for {variant}",
        home=home,
        depends_on=_torch_as_it_is(),
        environ=_threads(),
        retry_s=_RETRY_S,
    )
    if outcome.fault is not None:
        raise KernelsUnavailable(outcome.fault)
    return Kernels(variant, library, outcome.seconds)


def _candidates(variant: str) -> Sequence[str]:
    """Return the variants to try, the one that is usually fastest first."""
    if variant in VARIANTS:
        return [variant]
    announced = [name for name in VARIANTS if is_announced(name)]
    return [name for name in announced if variant != PORTABLE or name not in NOT_PORTABLE] or list(VARIANTS)[-1:]


def near_fastest(seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield the names of those that are not significantly slower than the fastest, in their order."""
    return (name for name, each in seconds.items() if each <= (1 + _TIMING_NOISE) * min(seconds.values()))


def _is_faster_than_torch(seconds_per_token: Mapping[str, float]) -> bool:
    """Return whether packed16 was faster than a 16-bit format of torch; False where torch has none."""
    return len(seconds_per_token) > 1 and _relative_time(seconds_per_token) < 1


def _relative_time(seconds_per_token: Mapping[str, float]) -> float:
    """Return the time of packed16 beside torch's of the same trial, since trials follow each other on a machine that
    may be busy during one of them; in seconds where torch has no 16-bit format."""
    others = [seconds for name, seconds in seconds_per_token.items() if name != "packed16"]
    return seconds_per_token["packed16"] / min(others, default=1.0)


def _torch_as_it_is() -> tuple[str | None, ...]:
    """Return what the times of torch's products depend on, besides the processor."""
    return torch.__version__, os.environ.get(ISA_VARIABLE)


def refusals(refused: Iterable[tuple[str, str]], prefix: str = "") -> str:
    """Return one line with the name and the problem of each refused implementation."""
    return ", ".join(f"{prefix}{name}: {problem}" for name, problem in refused)
