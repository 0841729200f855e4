"""Choose the implementations of this process: those that survived a trial on this processor with correct numbers.

Every path to a model comes here before its first product: the loaders of targets, drafters and learners, and so the
command line, the services, Ray's actors, the pipelines and vLLM's host.
"""

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omnidraft.errors import KernelsUnavailable, ModelError
from omnidraft.models.catalog import store
from omnidraft.models.native.build import SOURCE, VARIANTS, compiled
from omnidraft.models.probe.subprocess_trial import Outcome, run_once

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Limits the instructions of oneDNN, which multiplies torch's matrices. Read at its first product."""
_ISA_LIMITS = (None, "AVX512_CORE_BF16", "AVX2")
"""Values of that variable in the order of speed. AVX512_CORE_BF16 excludes AMX."""
SIXTEEN_BITS = {"bfloat16"}
"""Formats of torch that keep as much of every weight as packed16 does."""
NO_KERNELS = "torch"
"""The variant without our kernels."""

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
    refused: tuple[tuple[str, str], ...]
    """Variants that were tried before, each with its problem."""


def torch_products() -> TorchProducts:
    """Try torch's products and limit oneDNN in this process to instructions that work; the first call decides.

    A limit that ONEDNN_MAX_CPU_ISA sets already stays.

    Raises:
        ModelError: the trial itself could not run.
    """
    return _torch_products(store.default_home())


@cache
def _torch_products(home: Path) -> TorchProducts:
    preset = os.environ.get(ISA_VARIABLE)
    tried = []
    for isa in (preset,) if preset else _ISA_LIMITS:
        tried.append((isa, _try_torch(home, isa)))
        if tried[-1][1].fault is None:
            break
    isa, outcome = max(tried, key=lambda each: len(each[1].seconds))  # among equals the first, which is the fastest
    refused = tuple((str(other or "all instructions"), other_outcome.fault or "") for other, other_outcome in tried)
    refused = refused[: [other for other, _ in tried].index(isa)]
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
    import torch

    return run_once(
        (sys.executable, "-m", "omnidraft.models.probe.torch_products"),
        name=f"torch's matrix products with {isa or 'all instructions'}",
        home=home,
        depends_on=(torch.__version__, os.environ.get("OMP_NUM_THREADS")),
        environ={ISA_VARIABLE: isa} if isa else None,
    )


def kernels(variant: str = "auto") -> Kernels:
    """Return the build of our kernels to use, compiled and tried if that was not done yet.

    Args:
        variant: a name of VARIANTS must work; `auto` takes the first that does.

    Raises:
        KernelsUnavailable: none works here, none can be compiled, or `variant` is `torch`, which asks for none.
    """
    if variant == NO_KERNELS:
        raise KernelsUnavailable(f"models.kernels = '{NO_KERNELS}' asks for no kernels of ours")
    formats = SIXTEEN_BITS & torch_products().outcome.seconds.keys()
    return _kernels(store.default_home(), variant, tuple(formats), os.environ.get("CXX"))


@cache
def _kernels(home: Path, variant: str, formats: tuple[str, ...], _compiler: str | None) -> Kernels:
    refused: list[tuple[str, str]] = []
    for name in VARIANTS if variant == "auto" else (variant,):
        library = compiled(SOURCE, home / "native", VARIANTS[name])
        outcome = _try_kernels(home, library, formats)
        if outcome.fault is None:
            if refused:
                logger.warning(
                    "our kernels compiled as %s, which may be slower: %s", name, refusals(refused, "compiled as ")
                )
            return Kernels(name, library, outcome.seconds, tuple(refused))
        refused.append((name, outcome.fault))
    raise KernelsUnavailable(f"our kernels do not work on this processor: {refusals(refused, 'compiled as ')}")


def refusals(refused: Iterable[tuple[str, str]], prefix: str = "") -> str:
    """Return one line with the name and the problem of each refused implementation."""
    return ", ".join(f"{prefix}{name}: {problem}" for name, problem in refused)


def _try_kernels(home: Path, library: Path, formats: tuple[str, ...]) -> Outcome:
    import torch

    return run_once(
        (sys.executable, "-m", "omnidraft.models.probe.kernel_passes", str(library.resolve()), *formats),
        name=f"our kernels ({library.name})",
        home=home,
        depends_on=(torch.__version__, os.environ.get("OMP_NUM_THREADS"), os.environ.get(ISA_VARIABLE)),
    )
