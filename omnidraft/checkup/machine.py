"""The machine: compiler, processor, disk, memory, and the worker's port."""

import errno
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from omnidraft.checkup.finding import Finding, ok, problem, warning
from omnidraft.checkup.models import folder_of, weights_bytes
from omnidraft.config import Settings

SNAPSHOT_COPIES = 7
"""A snapshot of full weights in sizes of its bfloat16 drafter: served, master weights and two moments in float32."""
LOG_BYTES = 100_000_000
COMFORT = 3
"""So many times the need is plenty."""
BYTES_PER_WEIGHT = {"float32": 4.0, "int8": 1.2, "int4": 0.8}
"""As computed with, scales and the head's 8 bits included; every other precision keeps the 2 of bfloat16."""


def compiler(settings: Settings) -> Finding:
    """For our kernels; compiles them if no process has done so yet."""
    from omnidraft.errors import ModelError
    from omnidraft.models.native import library

    try:
        library.load()
    except ModelError as exc:
        wanted = {settings.models.precision, settings.models.drafter_precision} & set(library.PACKED)
        found = problem if wanted else warning
        return found("compiler", str(exc), "install it, or set precision and drafter_precision to bfloat16 or float32")
    return ok("compiler", "the native kernels are compiled for this processor")


def processor() -> Finding:
    """What torch found."""
    import torch

    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return judged_processor(torch.backends.cpu.get_cpu_capability(), has_bfloat16=has_bfloat16)


def judged_processor(capability: str, *, has_bfloat16: bool) -> Finding:
    """By the widest instructions that torch uses here, as torch names them."""
    if capability == "DEFAULT":
        advice = "use a processor with AVX2, or unset ATEN_CPU_CAPABILITY; decoding is many times slower without"
        return warning("processor", "no vector instructions are used", advice)
    return ok("processor", f"{capability}, {'with' if has_bfloat16 else 'without'} instructions for bfloat16")


def free_bytes(folder: Path) -> int:
    """Of the disk that this folder is on, or will be on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def disk(what: str, folder: Path, needed_bytes: int, free: Callable[[Path], int] = free_bytes) -> Finding:
    """Whether `folder` has room; `what` names the check."""
    available = free(folder.absolute())
    told = f"{_size(available)} free in {folder}, {_size(needed_bytes)} needed"
    advice = "free space there, or give it another folder"
    if available < needed_bytes:
        return problem(what, told, advice)
    return warning(what, told, advice) if available < COMFORT * needed_bytes else ok(what, told)


def folders(settings: Settings) -> Iterator[tuple[str, Path, int]]:
    """(check, folder, bytes needed) of every local folder that grows."""
    drafter = folder_of(settings.models.drafter)
    copies = SNAPSHOT_COPIES if settings.learner.train == "full" else 1
    snapshot_bytes = copies * weights_bytes(drafter) if drafter else 0
    if settings.log.url.startswith("sqlite:"):
        yield "disk of the log", Path(settings.log.url.split(":///", 1)[1]).parent, LOG_BYTES
    if settings.registry.url.startswith(("sqlite:", "directory:")):
        place = Path(settings.registry.url.split(":///", 1)[1])
        is_database = settings.registry.url.startswith("sqlite:")
        local = settings.registry.artifacts if "://" not in (settings.registry.artifacts or "") else None
        yield "disk of the registry", Path(local or (place.parent if is_database else place)), snapshot_bytes
    yield "disk of staging", Path(tempfile.gettempdir()), snapshot_bytes


def available_memory() -> int:
    """Of this machine, in bytes."""
    import psutil

    return psutil.virtual_memory().available


def memory(settings: Settings, available: Callable[[], int] = available_memory) -> Finding:
    """For one worker: every target and the drafter."""
    models = settings.models
    precisions = dict.fromkeys(models.targets, models.precision) | {models.drafter: models.drafter_precision}
    present = {name: folder for name in precisions if (folder := folder_of(name))}
    needed = sum(
        int(weights_bytes(folder) / 2 * BYTES_PER_WEIGHT.get(precisions[name], 2.0)) for name, folder in present.items()
    )
    told = f"{_size(available())} available, about {_size(needed)} for the weights of {len(present)} models"
    advice = "serve fewer targets, choose int8 or int4, or give the machine more memory"
    if available() < needed:
        return problem("memory", told, advice)
    return warning("memory", told, advice) if available() < 1.5 * needed else ok("memory", told)


def port(settings: Settings) -> Finding:
    """Free, or answered by a worker of ours."""
    from omnidraft import wiring
    from omnidraft.fleet.workers import look_at

    url, place = wiring.worker_url(settings), (settings.worker.host, settings.worker.port)
    if (refusal := _refusal(*place)) is None:
        return ok("worker port", f"{place[0]}:{place[1]} is free")
    advice = "set worker.host and worker.port to an address of this machine that nobody else uses"
    if refusal.errno != errno.EADDRINUSE:
        return problem("worker port", f"{place[0]}:{place[1]} cannot be used: {refusal.strerror or refusal}", advice)
    worker = look_at(url)
    if not worker.served:
        return problem("worker port", f"{url} is in use and {worker.problem}", advice)
    if worker.problem:
        return problem("worker port", f"the worker at {url}: {worker.problem}", "restart that worker")
    return ok("worker port", f"a worker answers at {url}, serving {', '.join(each.target for each in worker.served)}")


def _refusal(host: str, number: int) -> OSError | None:
    """What the system says to a server that wants this address."""
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
