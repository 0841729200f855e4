"""A worker that a user started, and clients that are run against it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

SCRIPTS = Path(__file__).parent / "scripts"
TARGET = os.environ.get("OMNIDRAFT_CLIENTS_TARGET", "qwen2.5-coder-1.5b")
SDKS = ("openai==3.57.0", "anthropic==2.14.0", "pydantic")


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    log: Path

    def environment(self, home: Path) -> dict[str, str]:
        """What a client needs to find it, with a home of its own and no telemetry."""
        keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "MODEL": self.model, "HOME": str(home)}
        urls = {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "ANTHROPIC_BASE_URL": self.url,
        }
        quiet = {"DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return {"PATH": os.environ["PATH"], "NODE_PATH": "", **keys, **urls, **quiet, **offline}


@contextmanager
def serving(folder: Path, target: str, *options: str, **settings: str) -> Iterator[Server]:
    """A worker of this target, which is whatever model a client asks for, until the block ends."""
    command = [
        sys.executable,
        "-m",
        "omnidraft.cli",
        "serve",
        "--target",
        target,
        "--drafter",
        "smollm2-135m",
        *options,
    ]
    own = {"LOG__URL": f"sqlite:///{folder}/log.db", "WORKER__MODEL_ALIASES": json.dumps({"*": target}), **settings}
    environment = os.environ | {f"OMNIDRAFT_{name}": value for name, value in own.items()}
    with running(command, folder, environment, "/readyz") as (url, log):
        yield Server(url, target, log)


@contextmanager
def running(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], ready: str
) -> Iterator[tuple[str, Path]]:
    """The URL and the log of a server with this command, to which its port is added, from when the path `ready` is
    answered until the block ends."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            while not _is_ready(url + ready):
                assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.5)
            yield url, folder / "server.log"
        finally:
            process.terminate()
            process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def run(command: Sequence[str | Path], server: Server, folder: Path, **variables: str) -> str:
    """The output of a client that ended well."""
    done = subprocess.run(
        list(map(str, command)), env=server.environment(folder) | variables, cwd=folder, capture_output=True, text=True,
        timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{server.log.read_text()[-1000:]}"
    return done.stdout
