"""GGUF files in llama.cpp's own formats, made by llama.cpp itself in a process of its own.

The process is `python -m pipelines.bench.engines.gguf_quantize IN OUT KIND`, with the bindings in PYTHONPATH.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from omnidraft.durable_files import replaced_file
from omnidraft.errors import ModelError
from omnidraft.models.llamacpp.context import library


def quantized(gguf: Path, kind: str, home: Path, environ: Mapping[str, str]) -> Path:
    """Return the file in another format, made below `home` the first time.

    Args:
        kind: one of llama.cpp's file types: Q8_0, Q4_K_M, BF16, ...
        environ: variables of a process that finds the bindings.

    Raises:
        ModelError: llama.cpp refuses it.
    """
    made = home / "llama-cpp-python" / "models" / f"{gguf.stem}-{gguf.stat().st_size}-{kind}.gguf"
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_name(f".{made.name}.lock")):
        if not made.exists():
            print(f"making {made.name}", file=sys.stderr)
            with replaced_file(made) as file:
                command = [sys.executable, "-m", __name__, str(gguf), file.name, kind]
                done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
                if done.returncode != 0:
                    raise ModelError(f"llama.cpp makes no {kind} of {gguf}: {done.stderr.strip()[-500:]}")
    return made


def main(source: str, made: str, kind: str) -> None:
    """Write a file in another format. Raises ModelError."""
    lib = library()
    settings = lib.llama_model_quantize_default_params()
    settings.allow_requantize = True
    settings.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if failure := lib.llama_model_quantize(source.encode(), made.encode(), ctypes.byref(settings)):
        raise ModelError(f"llama_model_quantize gave {failure}")


if __name__ == "__main__":
    main(*sys.argv[1:])
