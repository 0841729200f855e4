"""Whether this build of llama.cpp survives passes of several rows on this processor: tried in a process of its own.

Some builds do not (AMX code compiled in by native flags), and would take the worker with them. The outcome is
remembered by build, processor and GGUF file.
"""

import hashlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from omnidraft.errors import ModelError

_CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
_ROWS = (1, 4, 16)
_TIMEOUT_S = 600.0
_TRY = "import sys; from omnidraft.models.llamacpp_trial import try_passes; try_passes(sys.argv[1])"
_FIX = (
    "rebuild it without AMX: CMAKE_ARGS='-DGGML_NATIVE=OFF' pip install --force-reinstall --no-deps --no-cache-dir "
    "--no-binary llama-cpp-python llama-cpp-python"
)


def require_sound(gguf: Path, home: Path, command: Sequence[str] = (sys.executable, "-c", _TRY)) -> None:
    """Try the file once per build and processor.

    Args:
        home: outcomes are remembered in a folder of it.
        command: what to run, with the file as its last argument.

    Raises:
        ModelError: the process died, or could not run the model.
    """
    outcome = home / "llamacpp" / f"{_key(gguf)}.json"
    died_of = json.loads(outcome.read_text()) if outcome.is_file() else _trial(gguf, outcome, command)
    if died_of is not None:
        raise ModelError(
            f"this build of llama.cpp dies of {died_of} in a pass over {gguf.name} on this processor; {_FIX}"
        )


def try_passes(gguf: str) -> None:
    """Passes of several sizes over a GGUF file; run in a process that may die."""
    from omnidraft.models.llamacpp_context import CELL_STEP, Context, Entry, LlamaModel

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    context = Context(LlamaModel(Path(gguf)), CELL_STEP, max_rows=max(_ROWS), num_sequences=1, threads=1)
    for rows in _ROWS:
        context.decode([Entry(row, row) for row in range(rows)], has_logits=True)
        context.cut(0, 0)
    context.close()


def build() -> str:
    """Names the installed library files of llama.cpp by their content; "none" when there are none."""
    spec = find_spec("llama_cpp")
    folder = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    if folder is None or not folder.is_dir():
        return "none"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.is_symlink():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _trial(gguf: Path, outcome: Path, command: Sequence[str]) -> str | None:
    """The signal that the process died of."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        ran = subprocess.run(
            [*command, str(gguf)], env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ModelError(f"llama.cpp took more than {_TIMEOUT_S:.0f} s over a first pass with {gguf.name}") from exc
    if ran.returncode and -ran.returncode not in _CRASHES:
        said = ran.stderr.strip().splitlines()[-1:]
        raise ModelError(f"llama.cpp cannot run {gguf.name} (exit code {ran.returncode}): {' '.join(said)}")
    died_of = signal.Signals(-ran.returncode).name if ran.returncode else None
    outcome.parent.mkdir(parents=True, exist_ok=True)
    partial = outcome.with_name(f"{outcome.name}.{os.getpid()}")
    partial.write_text(json.dumps(died_of))
    partial.rename(outcome)
    return died_of


def _key(gguf: Path) -> str:
    facts = (build(), _processor(), gguf.name, gguf.stat().st_size)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What the processor is and can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})) or platform.processor()
