"""The servers that are compared, each a process of its own that ends with the measurement, however that ends."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from filelock import FileLock

from omnidraft.config import Settings
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.errors import ModelError
from omnidraft.files import replaced_file
from omnidraft.models.catalog import store
from omnidraft.system import default_home, usable_processors
from pipelines.lib import vllm_methods, vllm_server
from pipelines.lib.llama_build import LlamaPrograms, llama_programs

SERVERS = ("omnidraft", "llamacpp-server", "vllm")
NAMES = (*SERVERS, *vllm_methods.NAMES[1:])
"""The servers, and vLLM with each way of drafting."""
VLLM_DTYPE = "bfloat16"
_READY_S = 600.0
_SPARE_TOKENS = 64
"""Near its longest text vLLM asks for no drafts."""
_NUM_TOKENS = 7
"""Draft tokens of our proposer inside vLLM, as in docs/vllm.md."""


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """Options of all servers."""

    settings: Settings
    config_path: Path | None
    snapshot: str | None
    num_slots: int
    """Texts that a server has to decode side by side."""
    slot_tokens: int
    """Tokens of each, prompt and answer together."""
    vllm_venv: Path
    folder: Path
    """A folder for logs, traces and registry."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that is ready."""

    url: str
    model: str
    """The name that requests give."""
    weights: str
    """The format of the target's weights."""


def serving(name: str, setup: ServerSetup) -> AbstractContextManager[Endpoint]:
    """Return a context in which the server of this name is ready.

    Raises:
        ServiceFailed, ModelError: the server cannot be built or does not start.
    """
    own = {"omnidraft": _omnidraft, "llamacpp-server": _llamacpp}
    return own[name](setup) if name in own else _vllm(name, setup)


@contextmanager
def _omnidraft(setup: ServerSetup) -> Iterator[Endpoint]:
    """Serve the pair without recording, since the others record nothing."""
    models, port = setup.settings.models, free_port()
    options = {
        "--target": models.target,
        "--drafter": models.drafter,
        "--engine": models.engine,
        "--quantize": models.precision,
        "--snapshot": setup.snapshot,
        "--config": setup.config_path,
        "--port": port,
    }
    command = [sys.executable, "-m", "omnidraft.cli", "serve", "--no-record"]
    for option, value in options.items():
        command += [] if value is None else [option, str(value)]
    environ = {
        "OMNIDRAFT_LOG": f"sqlite:///{setup.folder}/log.db",
        "OMNIDRAFT_SCHEDULER__MAX_NUM_SEQS": str(setup.settings.scheduler.max_num_seqs),
    }
    if setup.snapshot is None:
        environ["MLFLOW_TRACKING_URI"] = f"directory://{setup.folder}/registry"
    with _http_server("omnidraft", command, environ, setup.folder, port, "/readyz") as url:
        yield Endpoint(url, models.target, models.precision)


@contextmanager
def _llamacpp(setup: ServerSetup) -> Iterator[Endpoint]:
    """Serve the catalog's GGUF file as it is, or with 8 bits a weight where our target has them."""
    home = default_home()
    programs, port = llama_programs(home), free_port()
    gguf = store.gguf_path(setup.settings.models.target)
    if setup.settings.models.precision == "int8":
        gguf = with_8_bits(programs, gguf, home)
    command = llama_server_command(programs, gguf, port, num_slots=setup.num_slots, slot_tokens=setup.slot_tokens)
    with _http_server("llama-server", command, {}, setup.folder, port, "/health") as url:
        (served,) = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"]
        yield Endpoint(url, served["id"], served["meta"]["ftype"])


def llama_server_command(
    programs: LlamaPrograms, gguf: Path, port: int, *, num_slots: int, slot_tokens: int
) -> list[str]:
    """Return the command that serves this file with all processors.

    Args:
        num_slots: texts that are decoded side by side.
        slot_tokens: tokens of each, prompt and answer together.
    """
    sizes = ["--parallel", str(num_slots), "--ctx-size", str(num_slots * slot_tokens)]
    address = ["--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    return [str(programs.server), "--model", str(gguf), *address, *sizes, "--threads", str(usable_processors())]


def with_8_bits(programs: LlamaPrograms, gguf: Path, home: Path) -> Path:
    """Return the file's Q8_0 below `home`: the same model with 8 bits a weight, as our int8 has it.

    Raises ModelError.
    """
    made = home / "llama-server" / "models" / f"{gguf.stem}-{gguf.stat().st_size}-Q8_0.gguf"
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_name(f".{made.name}.lock")):
        if not made.exists():
            with replaced_file(made) as file:
                quantize = [str(programs.quantize), "--allow-requantize", str(gguf), file.name, "Q8_0"]
                done = subprocess.run(quantize, capture_output=True, text=True)
                if done.returncode != 0:
                    raise ModelError(f"llama-quantize of {gguf}: {done.stderr.strip()[-500:]}")
    return made


@contextmanager
def _vllm(name: str, setup: ServerSetup) -> Iterator[Endpoint]:
    arguments = ["--dtype", VLLM_DTYPE, "--max-model-len", str(setup.slot_tokens + _SPARE_TOKENS)]
    arguments += ["--max-num-seqs", str(setup.num_slots), "--seed", "0"]
    target = store.resolve(setup.settings.models.target)
    speculation, environment = vllm_methods.speculation(
        name, setup.settings, setup.folder, num_tokens=_NUM_TOKENS, snapshot=setup.snapshot
    )
    with vllm_server.serve(
        setup.vllm_venv.resolve(),
        target,
        setup.folder / f"{name}.log",
        speculation=speculation,
        settings=environment,
        arguments=arguments,
    ) as server:
        yield Endpoint(server.url, "target", VLLM_DTYPE)


@contextmanager
def _http_server(
    name: str, command: Sequence[str], environ: Mapping[str, str], folder: Path, port: int, probe: str
) -> Iterator[str]:
    """Run a command that serves on this port; yield the URL once its probe says that it is ready."""
    url = f"http://127.0.0.1:{port}"
    with LocalCluster(folder, os.environ | environ) as cluster:
        cluster.start(name, command)
        cluster.wait_for(lambda: is_serving(url, probe), f"serving {name}", _READY_S)
        yield url
