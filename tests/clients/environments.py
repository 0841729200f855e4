"""Environments of the clients, made once and kept in the user's cache: Python's from PyPI, Node's from npm."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("OMNIDRAFT_CLIENTS", Path.home() / ".cache" / "omnidraft" / "clients"))


def python(requirements: Sequence[str]) -> Path:
    """The interpreter of an environment with these packages."""
    folder = CACHE / _digest(requirements)
    interpreter = folder / "bin" / "python"
    if not (folder / "whole").exists():
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([*uv, "pip", "install", "-q", "--python", str(interpreter), *requirements], check=True)
        (folder / "whole").touch()
    return interpreter


def node(packages: Sequence[str]) -> Path:
    """The folder whose node_modules has these packages."""
    folder = CACHE / _digest(packages)
    if not (folder / "whole").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=folder, check=True)
        (folder / "whole").touch()
    return folder


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
