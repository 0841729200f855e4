"""An engine's process, seen from its parent. A crash there is an error here."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from omnidraft.errors import ModelError
from omnidraft.exit_status import describe_exit
from omnidraft.models.catalog import store
from pipelines.bench.engines.engine import EngineSpec
from pipelines.bench.engines.gguf_quantize import quantized
from pipelines.lib.bytecode import bytecode_environment
from pipelines.lib.llama_bindings import ik_bindings, llama_bindings

LLAMACPP, IK = "llamacpp", "ik-llamacpp"
"""Systems that load GGUF files."""
_MODULE = "pipelines.bench.engines.worker"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    spec: EngineSpec
    facts: Mapping[str, int]
    """What its first line says: see worker.py."""
    _process: "subprocess.Popen[str]"
    _log: IO[bytes]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.facts["weight_bytes"] / self.facts["num_weights"]

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a command. Raises ModelError when the process died."""
        return _ask(self._process, self._log, command)


@contextmanager
def running(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Load an engine in a process that ends with the context; what it needs is built or downloaded the first time.

    Raises:
        ModelError: it cannot be loaded, or died of it.
    """
    loaded, environ = _prepared(spec, store.default_home())
    command = [sys.executable, "-m", _MODULE, json.dumps(asdict(loaded))]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **bytecode_environment(), **environ},
        )
        with process:
            facts = _ask(process, log)
            if reason := facts.get("error"):
                raise ModelError(reason)
            try:
                yield EngineProcess(spec, facts, process, log)
            finally:
                process.kill()


def _prepared(spec: EngineSpec, home: Path) -> tuple[EngineSpec, dict[str, str]]:
    """Return the spec with what its system loads, and the environment of its process."""
    if spec.system not in (LLAMACPP, IK):
        return spec, _finding()
    gguf = llamacpp_file(store.gguf_path(spec.model), spec.format, home)
    bindings = llama_bindings(home) if spec.system == LLAMACPP else ik_bindings(home)
    return replace(spec, model=str(gguf)), _finding(bindings)


def llamacpp_file(gguf: Path, kind: str, home: Path) -> Path:
    """Return a GGUF file in another of llama.cpp's formats; see gguf_quantize.quantized. Raises ModelError."""
    return quantized(gguf, kind, home, _finding(llama_bindings(home)))


def _finding(*bindings: Path) -> dict[str, str]:
    """Return an environment that finds everything that this process finds, and the bindings."""
    return {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), *map(str, bindings)])}


def _ask(process: "subprocess.Popen[str]", log: IO[bytes], command: Mapping[str, Any] | None = None) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if command is not None:
            print(json.dumps(command), file=process.stdin, flush=True)
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise ModelError(_reason(process, log))
    answer: dict[str, Any] = json.loads(line)
    return answer


def _reason(process: "subprocess.Popen[str]", log: IO[bytes]) -> str:
    """Describe how the process ended, with the last line that it wrote."""
    ended = describe_exit(process.wait()).partition(";")[0]
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f"the process ended with {ended}: {lines[-1] if lines else 'it said nothing'}"
