"""Bytecode for the processes that a benchmark starts: without it, each compiles torch and transformers anew (10 s)."""

import os
from pathlib import Path


def bytecode_environment() -> dict[str, str]:
    """Return variables that keep bytecode beside our models where Python may not write it beside the sources."""
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return {}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnidraft" / "bytecode"
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache)}
