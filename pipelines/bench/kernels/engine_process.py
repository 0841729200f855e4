"""An engine's process, seen from its parent. A crash there is an error here."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any

from omnidraft.errors import ModelError
from omnidraft.system import describe_exit
from pipelines.bench.kernels.engine import EngineSpec
from pipelines.lib.bytecode import bytecode_environment

_MODULE = "pipelines.bench.kernels.engine"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    spec: EngineSpec
    facts: Mapping[str, int]
    """What its first line says: see engine.py."""
    _process: "subprocess.Popen[str]"
    _log: IO[bytes]

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a command. Raises ModelError when the process died."""
        return _ask(self._process, self._log, command)


@contextmanager
def running(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Load an engine in a process that ends with the context; a build of our kernels is made the first time.

    Raises:
        ModelError: it cannot be loaded, or died of it.
    """
    command = [sys.executable, "-m", _MODULE, json.dumps(asdict(spec))]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **bytecode_environment(), **path},
        )
        with process:
            facts = _ask(process, log)
            if reason := facts.get("error"):
                raise ModelError(reason)
            try:
                yield EngineProcess(spec, facts, process, log)
            finally:
                process.kill()


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
