"""`omnidraft serve` as a process of its own, with settings that the measuring process has too."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnidraft import config
from pipelines.lib.local_cluster import LocalCluster, emptied, free_port, is_serving

START_TIMEOUT_S = 300.0
NAME = "server"


@dataclass(frozen=True, slots=True)
class ServeBenchPlan:
    """Sizes of one measurement."""

    out: Path
    target: str
    """`tiny` is a random model; so is the drafter."""
    drafter: str
    repeats: int
    """Of every way to ask, where overhead is measured."""
    tokens: int
    clients: int
    seconds: float
    """Of load."""
    swaps: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers."""

    url: str
    pid: int
    settings: config.Settings
    folder: Path


@contextmanager
def serving(plan: ServeBenchPlan, part: str, more: str = "") -> Iterator[Server]:
    """Started, ready, and stopped at the end.

    Args:
        more: TOML of the part's own: keys of [worker] first, then other sections.
    """
    folder = emptied(plan.out / part)
    path = folder / "settings.toml"
    port = free_port()
    path.write_text(
        f'{_models(plan)}\n[log]\nurl = "sqlite:///{folder}/log.db"\n'
        f'[registry]\nurl = "directory:///{folder}/registry"\n[worker]\nport = {port}\npoll_s = 0.5\n{more}\n'
    )
    settings = config.load(path, {})
    url = f"http://127.0.0.1:{port}"
    with LocalCluster(path, folder) as fleet:
        fleet.start(NAME, [sys.executable, "-m", "omnidraft.cli", "serve", "--config", str(path)])
        fleet.wait_for(lambda: is_serving(url), "serving worker", START_TIMEOUT_S)
        yield Server(url, fleet.pid(NAME), settings, folder)


def _models(plan: ServeBenchPlan) -> str:
    """Reproducible mode and a fixed number of drafted tokens: two processes decode the same text in the same passes."""
    names = {"target": plan.target, "drafter": plan.drafter}
    lines = ["[models]"]
    if "tiny" in names.values():
        names |= {name: str(folder) for name, folder in _tiny(plan).items() if names[name] == "tiny"}
    lines += [f'{name} = "{value}"' for name, value in names.items()]
    if plan.target == "tiny":
        lines += ['precision = "float32"', 'drafter_precision = "float32"']
    threads = 1 if plan.target == "tiny" else os.cpu_count() or 1
    lines += ["[decode]", 'mode = "reproducible"', 'policy = "fixed"', "num_draft_tokens = 4", f"threads = {threads}"]
    return "\n".join(lines)


def _tiny(plan: ServeBenchPlan) -> dict[str, Path]:
    from omnidraft.testing.tiny_models import make_drafter, make_target

    folders = {"target": plan.out.absolute() / "target", "drafter": plan.out.absolute() / "drafter"}
    if not folders["drafter"].exists():
        make_target(folders["target"], spread=0.3)
        make_drafter(folders["drafter"])
    return folders
