"""Checks of the machine: kernels, processor, disk, memory, and the worker's port."""

import errno
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft import system
from omnidraft.config import ModelSettings, Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning
from omnidraft.doctor.models import folder_of, gguf_of, weights_bytes
from omnidraft.files import existing_ancestor, may_write

if TYPE_CHECKING:
    from omnidraft.models.probe.choice import Kernels, TorchProducts

SNAPSHOT_COPIES = 7
"""The size of a full snapshot relative to its bfloat16 drafter: serving weights, and master weights and two moments in
float32."""
LOG_BYTES = 100_000_000
COMFORT = 3
"""The ratio of free to needed disk space below which there is a warning."""
BYTES_PER_WEIGHT = {"float32": 4.0, "int8": 1.2, "int4": 0.8}
"""Bytes per weight in memory, scales and the 8-bit head included; all other precisions take the 2 of bfloat16."""


def kernels(settings: Settings) -> Finding:
    """Check which build of our kernels works here; compile and try them if no process has done so yet."""
    from omnidraft.errors import KernelsUnavailable
    from omnidraft.models.native import library
    from omnidraft.models.native.build import VARIANTS
    from omnidraft.models.probe import choice

    section = settings.models
    if section.kernels == choice.NO_KERNELS:
        return ok("kernels", "models.kernels = 'torch': ours are not used")
    try:
        chosen = choice.kernels(section.kernels)
    except KernelsUnavailable as exc:
        needed = {section.precision, section.drafter_precision} & set(library.PACKED) or section.kernels in VARIANTS
        severity = problem if needed else warning
        advice = "mend that, or leave kernels, precision and drafter_precision at auto"
        return severity("kernels", str(exc), advice)
    return kernels_finding(chosen)


def kernels_finding(chosen: "Kernels") -> Finding:
    """Return the finding about a working build of our kernels and the builds refused before it."""
    from omnidraft.models.probe.choice import refusals

    message = f"compiled for {chosen.variant}, tried and right: {_times(chosen.seconds_per_token)}"
    if chosen.refused:
        message = f"{message}; not used: {refusals(chosen.refused)}"
        advice = "report it, unless memory or a sandbox is why: the compiler uses instructions that do not run here"
        return warning("kernels", message, advice)
    return ok("kernels", message)


def processor() -> Finding:
    """Check torch's matrix products on this processor."""
    import torch

    from omnidraft.models.probe import choice

    return processor_finding(torch.backends.cpu.get_cpu_capability(), choice.torch_products())


def processor_finding(capability: str, products: "TorchProducts") -> Finding:
    """Return the finding from the widest instructions that torch uses, as torch names them, and the trials' outcome."""
    from omnidraft.models.probe.choice import refusals

    message = f"{capability}, torch's products tried and right: {_times(products.outcome.seconds)}"
    if products.outcome.fault:
        advice = "no model is computed by what is wrong here; report it with `omnidraft doctor --json`"
        return warning("processor", f"{message}; torch {products.outcome.fault}", advice)
    if capability in ("NO AVX", "DEFAULT") and platform.machine() in ("x86_64", "AMD64"):  # else NEON or the like
        advice = "use a processor with AVX2, or unset ATEN_CPU_CAPABILITY; decoding is many times slower without"
        return warning("processor", "no vector instructions are used", advice)
    if products.refused:
        message = f"{message}; oneDNN is kept to {products.isa}, since with {refusals(products.refused)}"
        return warning("processor", message, "nothing has to be done; ask the provider of this machine why AMX traps")
    return ok("processor", message)


def precision(settings: Settings) -> Finding:
    """Return the precision that `auto` selects here."""
    from omnidraft.models import precision as precisions

    section = settings.models
    if section.precision != "auto" or section.engine == "llamacpp":
        return ok("precision", f"models.precision = '{section.precision}'")
    return ok("precision", f"auto is {precisions.automatic(section.kernels)}, by the times of these trials")


def _times(seconds_per_token: Mapping[str, float]) -> str:
    times = (f"{name} {1000 * each:.2f} ms" for name, each in seconds_per_token.items())
    return f"{', '.join(times) or 'none'} by token"


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that this folder is on, or will be on."""
    return shutil.disk_usage(existing_ancestor(folder)).free


def disk(what: str, folder: Path, needed_bytes: int, free: Callable[[Path], int] = free_bytes) -> Finding:
    """Check the free space of `folder`; `what` names the check."""
    available = free(folder.absolute())
    message = f"{_size(available)} free in {folder}, {_size(needed_bytes)} needed"
    advice = "free space there, or give it another folder"
    if available < needed_bytes:
        return problem(what, message, advice)
    if not may_write(existing_ancestor(folder.absolute())):
        return problem(what, f"{folder} cannot be written", "make it writable, or give another folder")
    return warning(what, message, advice) if available < COMFORT * needed_bytes else ok(what, message)


def folders(settings: Settings) -> Iterator[tuple[str, Path, int]]:
    """Yield (check, folder, bytes needed) for every local folder that grows."""
    drafter = folder_of(settings.models.drafter)
    copies = SNAPSHOT_COPIES if settings.learner.train == "full" else 1
    snapshot_bytes = copies * weights_bytes(drafter) if drafter else 0
    if settings.log.path is not None:
        yield "disk of the log", settings.log.path.parent, LOG_BYTES
    registry = settings.registry
    if registry.path is not None:
        local = registry.artifacts if "://" not in (registry.artifacts or "") else None
        folder = registry.path.parent if registry.is_in_mlflow else registry.path
        yield "disk of the registry", Path(local or folder), snapshot_bytes
    yield "disk of staging", Path(tempfile.gettempdir()), snapshot_bytes


def memory(settings: Settings, available: Callable[[], int] = system.available_memory) -> Finding:
    """Check the memory for one worker with every target, the members of an ensemble and the drafter."""
    section = settings.models
    sizes = _sizes_in_memory(section)
    needed = sum(sizes)
    message = f"{_size(available())} available, about {_size(needed)} for the weights of {len(sizes)} models"
    smaller = "a GGUF file of fewer bits" if section.engine == "llamacpp" else "int8 or int4"
    fewer = "fewer members" if section.engine == "ensemble" else "fewer targets"
    advice = f"serve {fewer}, choose {smaller}, or give the machine more memory"
    if available() < needed:
        return problem("memory", message, advice)
    return warning("memory", message, advice) if available() < 1.5 * needed else ok("memory", message)


def _sizes_in_memory(section: ModelSettings) -> list[int]:
    """Return the bytes of the weights of each model that is on this machine; llama.cpp maps a GGUF file as it is."""
    if section.engine == "llamacpp":
        sizes = [file.stat().st_size for name in section.targets if (file := gguf_of(name))]
    else:
        sizes = [_size_in_memory(name, section.precision) for name in (*section.targets, *section.members)]
    if section.has_drafter:
        sizes.append(_size_in_memory(section.drafter, section.drafter_precision))
    return [size for size in sizes if size]


def _size_in_memory(name: str, precision: str) -> int:
    """Return the bytes of a model's weights in this precision; 0 where the model is not installed."""
    folder = folder_of(name)
    return int(weights_bytes(folder) / 2 * BYTES_PER_WEIGHT.get(precision, 2.0)) if folder else 0


def port(settings: Settings) -> Finding:
    """Check that the worker's port is free, or answered by a worker of ours."""
    from omnidraft import assembly
    from omnidraft.fleet.workers import worker_status

    url, address = assembly.worker_url(settings), (settings.worker.host, settings.worker.port)
    if (refusal := _refusal(*address)) is None:
        return ok("worker port", f"{address[0]}:{address[1]} is free")
    advice = "set worker.host and worker.port to an address of this machine that nobody else uses"
    if refusal.errno != errno.EADDRINUSE:
        return problem(
            "worker port", f"{address[0]}:{address[1]} cannot be used: {refusal.strerror or refusal}", advice
        )
    worker = worker_status(url, metrics_key=settings.worker.metrics_key)
    if not worker.served:
        return problem("worker port", f"{url} is in use and {worker.problem}", advice)
    if worker.problem:
        return problem("worker port", f"the worker at {url}: {worker.problem}", "restart that worker")
    return ok("worker port", f"a worker answers at {url}, serving {', '.join(each.target for each in worker.served)}")


def _refusal(host: str, number: int) -> OSError | None:
    """Try to bind this address; return the error, or None."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except OSError as exc:
        return exc
    return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
