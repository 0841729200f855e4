"""What the hardware allows: the bandwidth of memory and the peak of arithmetic, by machine_limits.cpp."""

import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
LIMITS = {
    "read": "read_gb_per_s",
    "float32": "float32_gop_per_s",
    "bfloat16": "bfloat16_gop_per_s",
    "int8": "int8_gop_per_s",
    "bfloat16-amx": "bfloat16_amx_gop_per_s",
    "int8-amx": "int8_amx_gop_per_s",
}
"""What the program measures -> the name of the figure."""


def measure() -> dict[str, float | str | None]:
    """Compile and run the program; a figure is None where it does not run, which instructions of AMX may not."""
    with tempfile.TemporaryDirectory(prefix="omnidraft-limits-") as folder:
        program = Path(folder) / SOURCE.stem
        compiler = os.environ.get("CXX") or "g++"
        try:
            subprocess.run(
                [compiler, "-std=c++17", "-O3", "-march=native", "-fopenmp", str(SOURCE), "-o", str(program)],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as exc:
            return {"error": f"machine_limits.cpp cannot be compiled: {exc}"}
        return {name: _run(program, what) for what, name in LIMITS.items()}


def _run(program: Path, what: str) -> float | None:
    done = subprocess.run([str(program), what], capture_output=True, text=True)
    return float(done.stdout) or None if done.returncode == 0 else None
