"""Test in a process of its own that this build of llama.cpp survives passes of several rows on this processor.

Some builds do not (AMX code compiled in by native flags), and would crash the worker. The outcome is cached by build,
processor and GGUF file.
"""

import hashlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from omnidraft.errors import ModelError
from omnidraft.models.probe.subprocess_trial import run_once

_ROWS = (1, 4, 16)
_TRY = "import sys; from omnidraft.models.llamacpp.crash_probe import try_passes; try_passes(sys.argv[1])"
_FIX = (
    "rebuild it without AMX: CMAKE_ARGS='-DGGML_NATIVE=OFF' pip install --force-reinstall --no-deps --no-cache-dir "
    "--no-binary llama-cpp-python llama-cpp-python"
)


def require_surviving_build(gguf: Path, home: Path, command: Sequence[str] = (sys.executable, "-c", _TRY)) -> None:
    """Try the file once per build and processor.

    Args:
        home: outcomes are cached in a folder of it.
        command: the command to run; the file is added as its last argument.

    Raises:
        ModelError: the process died, or could not run the model.
    """
    outcome = run_once(
        (*command, str(gguf)),
        name=f"llama.cpp with {gguf.name}",
        home=home,
        depends_on=(build(), gguf.stat().st_size),
    )
    if outcome.died_of is not None:
        raise ModelError(
            f"this build of llama.cpp dies of {outcome.died_of} in a pass over {gguf.name} on this processor; {_FIX}"
        )


def try_passes(gguf: str) -> None:
    """Run passes of several sizes over a GGUF file, in a process that may die."""
    from omnidraft.models.llamacpp.context import CELL_STEP, BatchEntry, Context, LlamaModel

    context = Context(LlamaModel(Path(gguf)), CELL_STEP, max_rows=max(_ROWS), num_sequences=1, threads=1)
    for rows in _ROWS:
        context.decode([BatchEntry(row, row) for row in range(rows)])
        context.cut(0, 0)
    context.close()


def build() -> str:
    """Return a hash of the installed library files of llama.cpp, or "none" when there are none."""
    spec = find_spec("llama_cpp")
    folder = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    if folder is None or not folder.is_dir():
        return "none"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.is_symlink():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
