"""The seconds from executing `omnidraft serve` to the first request at full speed, by phase.

`python -m pipelines.bench.start --quantize int8 --starts 5 --json OUT`. The first start packs models and writes
bytecode; it is not counted. Phases are the lines that the server logs meanwhile.

ready_s        from exec until /readyz answers 200
processor_s    what the server and its children computed until then, user and system: other load changes it less
first_chat_s   a chat of one token right after that; next_chat_s: the same again with another prompt
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from omnidraft.demo.local_cluster import LocalCluster, free_port
from omnidraft.files import save_json
from omnidraft.hosts import process
from pipelines.lib import machine
from pipelines.lib.bytecode import bytecode_environment

_TIMEOUT_S = 600.0
_POLL_S = 0.02
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) [A-Z]+ ([\w.]+): (.*)")
_TEXTS = ("What is 12 * 17?", "Name a river in Peru.")


@dataclass(frozen=True, slots=True)
class Start:
    """One start."""

    ready_s: float
    processor_s: float
    first_chat_s: float
    next_chat_s: float
    phases: Sequence[tuple[str, float]]
    """The server's log lines, each with its seconds since exec."""


def main(
    target: Annotated[str, typer.Option()] = "qwen2.5-coder-1.5b",
    drafter: Annotated[str, typer.Option()] = "smollm2-135m",
    quantize: Annotated[str, typer.Option(help="int8 or int4; auto: the settings' own.")] = "int8",
    starts: Annotated[int, typer.Option(min=1, help="Starts that count.")] = 5,
    registry: Annotated[str | None, typer.Option(help="A URL; without it MLflow in an empty folder.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all starts.")] = None,
) -> None:
    """Measure how long a server takes to be ready."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--target", target, "--drafter", drafter]
        options += [] if quantize == "auto" else ["--quantize", quantize]
        measured = [_start(Path(folder), options, registry) for _ in range(1 + starts)][1:]
    typical = sorted(measured, key=lambda each: each.ready_s)[len(measured) // 2]
    Console().print(_phases(typical), _summary(measured))
    if json_path is not None:
        save_json(_content(measured), json_path)


def _start(folder: Path, options: Sequence[str], registry: str | None) -> Start:
    """Start a server, ask it twice, and stop it. Raises ServiceFailed when it does not start."""
    port = free_port()
    environ = {**bytecode_environment(), "OMNIDRAFT_LOG": f"sqlite:///{folder}/log.db"}
    environ["MLFLOW_TRACKING_URI"] = registry or f"sqlite:///{folder}/mlflow.db"
    command = [sys.executable, "-m", "omnidraft.cli", "serve", "--port", str(port), *options]
    logs, url = Path(tempfile.mkdtemp(dir=folder)), f"http://127.0.0.1:{port}"
    cluster = LocalCluster(logs, os.environ | environ)
    with cluster, httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        began = time.time()
        cluster.start("serve", command)
        cluster.wait_for(lambda: _is_ready(client), "serving worker", _TIMEOUT_S, poll_s=_POLL_S)
        ready_s, processor_s = time.time() - began, _processor_s(cluster.pid("serve"))
        phases = [(line, at - began) for line, at in _lines(logs / "serve.log")]
        first_chat_s, next_chat_s = (_chat_s(client, text) for text in _TEXTS)
        return Start(ready_s, processor_s, first_chat_s, next_chat_s, phases)


def _processor_s(pid: int) -> float:
    process_tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(each.cpu_times()[:4]) for each in process_tree)  # with those of children that ended


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _chat_s(client: httpx.Client, text: str) -> float:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    client.post("/v1/chat/completions", json=body).raise_for_status()
    return time.perf_counter() - began


def _lines(log_path: Path) -> list[tuple[str, float]]:
    found = filter(None, map(_LOG_LINE.match, log_path.read_text().splitlines()))
    return [(each[3], datetime.strptime(f"{each[1]}000", "%Y-%m-%d %H:%M:%S,%f").timestamp()) for each in found]


def _phases(start: Start) -> Table:
    table = Table("seconds since exec", "its own", "log line", title="The median start")
    before = 0.0
    for line, at in (*start.phases, ("/readyz answers 200", start.ready_s)):
        table.add_row(f"{at:.2f}", f"{at - before:.2f}", line)
        before = at
    return table


def _summary(starts: Sequence[Start]) -> Table:
    table = Table("", "median", "all")
    for name in ("ready_s", "processor_s", "first_chat_s", "next_chat_s"):
        values = [getattr(each, name) for each in starts]
        table.add_row(name, f"{median(values):.2f}", " ".join(f"{each:.2f}" for each in values))
    return table


def _content(starts: Sequence[Start]) -> dict[str, Any]:
    return machine.made_by("pipelines.bench.start") | {"starts": [asdict(each) for each in starts]}


if __name__ == "__main__":
    process.entry("start", main)
