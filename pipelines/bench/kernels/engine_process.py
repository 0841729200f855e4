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


@dataclass(slots=True)
class EngineProcess:
    """A running engine."""

    spec: EngineSpec
    process: "subprocess.Popen[str]"
    log: IO[bytes]
    weight_bytes: int = 0

    def ask(self, command: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a command, or the line before any. Raises ModelError when the process died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if command is not None:
                print(json.dumps(command), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ModelError(self._reason())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _reason(self) -> str:
        """Describe how the process ended, with the last line that it wrote."""
        ended = describe_exit(self.process.wait()).partition(";")[0]
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with {ended}: {lines[-1] if lines else 'it said nothing'}"


@contextmanager
def running(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Load an engine in a process that ends with the context; a build of our kernels is made the first time.

    Raises:
        ModelError: it cannot be loaded, or died of it.
    """
    command = [sys.executable, "-m", _MODULE, json.dumps(asdict(spec))]
    environ = {**os.environ, **bytecode_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environ) as process,
    ):
        engine = EngineProcess(spec, process, log)
        facts = engine.ask()
        if reason := facts.get("error"):
            raise ModelError(reason)
        engine.weight_bytes = facts["weight_bytes"]
        try:
            yield engine
        finally:
            process.kill()
