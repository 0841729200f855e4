"""The command line of llama.cpp's own server, and the GGUF file that it serves."""

import subprocess
from pathlib import Path

from filelock import FileLock

from omnidraft.errors import ModelError
from omnidraft.files import replaced_file
from omnidraft.system import usable_processors
from pipelines.lib.llama_build import LlamaPrograms


def command(programs: LlamaPrograms, gguf: Path, port: int, *, num_slots: int, slot_tokens: int) -> list[str]:
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
