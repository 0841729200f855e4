"""An engine's process, seen from its parent. A crash there is an error here."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnidraft import child
from omnidraft.errors import ModelError
from pipelines.bench.kernels.engine import EngineSpec
from pipelines.lib.bytecode import bytecode_environment

_MODULE = "pipelines.bench.kernels.engine"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    spec: EngineSpec
    facts: Mapping[str, int]
    """What its first line says: see engine.py."""
    _process: "subprocess.Popen[bytes]"
    _log: Path

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a command. Raises ModelError when the process died."""
        return _ask(self._process, self._log, command)


@contextmanager
def running(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Load an engine in a process that ends with the context; a build of our kernels is made the first time.

    Raises:
        ModelError: it cannot be loaded, or died of it.
    """
    with tempfile.NamedTemporaryFile() as log:
        process = child.start_with_pipes(
            _MODULE, json.dumps(asdict(spec)), log=log.file, environ=bytecode_environment()
        )
        try:
            facts = _ask(process, Path(log.name))
            if reason := facts.get("error"):
                raise ModelError(reason)
            yield EngineProcess(spec, facts, process, Path(log.name))
        finally:
            child.kill(process)


def _ask(process: "subprocess.Popen[bytes]", log: Path, command: Mapping[str, Any] | None = None) -> dict[str, Any]:
    answer = child.ask(process, command)
    if answer is None:
        raise ModelError(f"the process ended with {child.exit_name(process.wait())}: {child.last_lines(log)}")
    return answer
