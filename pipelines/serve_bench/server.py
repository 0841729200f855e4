"""A worker as a process of its own; its settings are known to the measuring process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnidraft import config
from omnidraft.container_limits import usable_processors
from omnidraft.demo.local_cluster import (
    LocalCluster,
    empty_folder,
    free_port,
    is_serving,
    service_command,
    tiny_models,
)

START_TIMEOUT_S = 300.0
NAME = "server"


@dataclass(frozen=True, slots=True)
class ServeBenchPlan:
    """The sizes of one measurement."""

    out: Path
    target: str
    """A model, or `tiny` for a random one; the drafter likewise."""
    drafter: str
    repeats: int
    """The number of requests of each kind where overhead is measured."""
    tokens: int
    clients: int
    seconds: float
    """The duration of the load."""
    swaps: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    pid: int
    settings: config.Settings
    folder: Path


@contextmanager
def serving(plan: ServeBenchPlan, part: str, more: str = "") -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it when the context ends.

    Args:
        more: additional TOML of the part: keys of [worker] first, then other sections.
    """
    folder = empty_folder(plan.out / part)
    path = folder / "settings.toml"
    port = free_port()
    path.write_text(
        f'{_models(plan)}\n[log]\nurl = "sqlite:///{folder}/log.db"\n'
        f'[registry]\nurl = "directory:///{folder}/registry"\n[worker]\nport = {port}\npoll_s = 0.5\n{more}\n'
    )
    settings = config.load(path, {})
    url = f"http://127.0.0.1:{port}"
    with LocalCluster(folder, config.without_settings(os.environ)) as cluster:
        pid = cluster.start(NAME, service_command("decode_worker", path))
        cluster.wait_for(lambda: is_serving(url), "serving worker", START_TIMEOUT_S)
        yield Server(url, pid, settings, folder)


def _models(plan: ServeBenchPlan) -> str:
    """Return settings with which two processes decode a text in the same passes: reproducible mode, fixed policy."""
    names = {"target": plan.target, "drafter": plan.drafter}
    lines = ["[models]"]
    if "tiny" in names.values():
        names |= {name: str(folder) for name, folder in tiny_models(plan.out).items() if names[name] == "tiny"}
    lines += [f'{name} = "{value}"' for name, value in names.items()]
    if plan.target == "tiny":
        lines += ['precision = "float32"', 'drafter_precision = "float32"']
    threads = 1 if plan.target == "tiny" else usable_processors()
    lines += ["[decode]", 'mode = "reproducible"', 'policy = "fixed"', "num_draft_tokens = 4", f"threads = {threads}"]
    return "\n".join(lines)
