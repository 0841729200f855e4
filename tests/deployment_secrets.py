"""The secrets that deploy/new_secrets.py makes, as the services get them."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "deploy/new_secrets.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def variables_in(file: Path) -> dict[str, str]:
    """Of an environment file, as Docker Compose reads them."""
    lines = (line.split("=", 1) for line in file.read_text().splitlines())
    return {name: value.strip("'") for name, value in lines}


@cache
def _compose() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        assert run_script(Path(folder, "env")).returncode == 0
        return variables_in(Path(folder, "env"))


@cache
def _kubernetes() -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "secrets.json")
        assert run_script("--kubernetes", file).returncode == 0
        return {each["metadata"]["name"]: each["stringData"] for each in json.loads(file.read_text())["items"]}


def substituted(value: str) -> str:
    """A value of docker-compose.yml with its variables."""
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda match: _compose()[match[1]], value)


def value_of(variable: Mapping[str, Any]) -> str:
    """That of a container's variable; what else than our own secrets the pod fills in is a number of processors."""
    reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
    of_ours = _kubernetes().get(reference.get("name"), {}).get(reference.get("key"), "4")
    return str(variable.get("value", of_ours))
