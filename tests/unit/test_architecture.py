"""The import rule of the repository, and the few other promises about its shape.

Imports go down the levels below, also inside functions. Units of one level do not import each other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("omnidraft", "services", "pipelines")

LEVELS = (  # lowest first
    {"errors", "config", "private_files", "progress", "threads", "system", "stats"},
    {"throttle"},
    {"allowed_hosts", "child", "client", "extras", "files", "params", "pictures"},
    {"vocab", "traces", "snapshots", "prompts", "memory", "tools"},
    {"ports"},
    {"bus", "registry", "models", "telemetry", "decode", "distill", "fleet"},
    {"serving", "exactness", "audit", "device", "sampling_params", "testing", "transfer"},
    {"assembly"},
    {"hosts", "doctor", "llm", "transformers", "whatif"},
    {"demo"},
    {"cli"},
    {"services", "pipelines"},
)
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}
SIDEWAYS = {("config", "errors"), ("omnidraft", "llm")}

CLIENTS: dict[str, str | tuple[str, ...]] = {  # third-party package -> the only places that import it
    "kafka": "omnidraft/bus/kafka_",
    "mlflow": "omnidraft/registry/",
    "sqlalchemy": ("omnidraft/bus/key_store.py", "omnidraft/registry/"),
    "transformers": ("omnidraft/models/", "omnidraft/testing/tiny_models.py", "omnidraft/transformers.py"),
    "peft": "omnidraft/models/",
    "llama_cpp": "omnidraft/models/",
    "llguidance": "omnidraft/decode/sampling/grammar_compiler.py",
    "opentelemetry": "omnidraft/telemetry/tracing.py",
    "ray": "omnidraft/hosts/",
    "vllm": "omnidraft/hosts/",
}
HEAVY = ("torch", "transformers", "peft", "mlflow", "ray", "kafka", "matplotlib")

MAX_LINES = 300
MAX_MAIN_LINES = 80


def product_files(root: Path) -> list[Path]:
    return sorted(path for top in PRODUCT for path in (root / top).rglob("*.py"))


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file; for `from a import b` both a and a.b."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def unit_of(name: str) -> str | None:
    """The unit of a dotted name, None when it is not ours or the bare `omnidraft`, which holds the version only."""
    first, _, rest = name.partition(".")
    if first != "omnidraft":
        return first if first in PRODUCT else None
    second = rest.partition(".")[0]
    return None if second in ("", "__version__") else second.removeprefix("__main__") or "cli"


def complaint(importer: str, target: str) -> str | None:
    if importer == target or (importer, target) in SIDEWAYS:
        return None
    for unit in (importer, target):
        if unit not in LEVEL_OF:
            return f"{unit} has no level"
    if LEVEL_OF[importer] > LEVEL_OF[target]:
        return None
    return f"{importer} must not import {target}"


def violations(root: Path) -> list[str]:
    """Every broken import of the tree, as `file:line reason`."""
    found = set()
    for path in product_files(root):
        where = path.relative_to(root).as_posix()
        importer = unit_of(where.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
        for line, name in imported(path, root):
            client = name.partition(".")[0]
            if client in CLIENTS and not where.startswith(CLIENTS[client]):
                found.add(f"{where}:{line} only {CLIENTS[client]} imports {client}")
            target = unit_of(name)
            if target and (reason := complaint(importer or "omnidraft", target)):
                found.add(f"{where}:{line} {reason}")
    return sorted(found)


def plant(root: Path, file: str, code: str) -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return root


def test_imports_go_down_only():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("omnidraft/decode/loop.py", "from omnidraft.distill import learner", "decode must not import distill"),
        (
            "omnidraft/distill/distiller.py",
            "def f():\n    import omnidraft.decode.decoder",
            "distill must not import decode",
        ),
        ("omnidraft/decode/drafting/prompt_lookup.py", "from ...bus import x", "decode must not import bus"),
        ("omnidraft/decode/loop.py", "from omnidraft import serving", "decode must not import serving"),
        ("omnidraft/vocab/align.py", "from omnidraft.traces.record import TraceRecord", "vocab must not import traces"),
        ("omnidraft/config/sections.py", "from omnidraft.ports import Target", "config must not import ports"),
        ("omnidraft/errors.py", "import omnidraft.config", "errors must not import config"),
        ("omnidraft/assembly.py", "from omnidraft.hosts import worker", "assembly must not import hosts"),
        ("omnidraft/hosts/worker.py", "from services.controller import main", "hosts must not import services"),
        ("omnidraft/__init__.py", "from omnidraft import errors", "omnidraft has no level"),
        ("omnidraft/utils/x.py", "from omnidraft import errors", "utils has no level"),
        ("services/worker/main.py", "from pipelines import record", "services must not import pipelines"),
        (
            "pipelines/record.py",
            "def f():\n    import mlflow.tracking",
            "only omnidraft/registry/ imports mlflow",
        ),
        ("omnidraft/bus/sqlite_log.py", "from kafka import KafkaConsumer", "only omnidraft/bus/kafka_ imports"),
        ("omnidraft/assembly.py", "def f():\n    from transformers import x", "imports transformers"),
        ("omnidraft/distill/distiller.py", "import ray", "only omnidraft/hosts/ imports ray"),
    ],
)
def test_the_rule_catches_a_planted_violation(tmp_path, file, code, reason):
    found = violations(plant(tmp_path, file, code))
    assert found
    assert all(file in line and reason in line for line in found)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("omnidraft/serving/app.py", "from omnidraft.decode.decoder import decode"),
        ("omnidraft/config/sources.py", "from omnidraft.errors import ConfigError"),
        ("omnidraft/decode/loop.py", "from omnidraft import __version__, ports\nfrom . import path"),
        ("omnidraft/bus/kafka_log.py", "import kafka"),
        ("omnidraft/__main__.py", "from omnidraft.cli import main"),
        ("services/worker/__main__.py", "from services.worker.main import main"),
    ],
)
def test_the_rule_lets_through_what_it_allows(tmp_path, file, code):
    assert violations(plant(tmp_path, file, code)) == []


@pytest.mark.parametrize(
    "module",
    [
        "omnidraft.cli",
        "omnidraft.hosts.process",
        "services.decode_worker.main",
        "omnidraft.decode.sampling.grammar_child",
    ],
)
def test_a_command_line_loads_nothing_heavy(module):
    """`omnidraft --help` must answer at once."""
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


def test_a_worker_loads_torch_and_nothing_else_that_is_heavy():
    """Each of the others takes a second or more of every start."""
    code = f"import sys, omnidraft.hosts.worker; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "torch"), ran.stderr


def test_every_module_says_what_it_is_for():
    silent = [path for path in product_files(ROOT) if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_files_stay_readable_in_one_go():
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in product_files(ROOT)}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_service_mains_stay_thin():
    mains = {path: len(path.read_text().splitlines()) for path in (ROOT / "services").rglob("main.py")}
    assert mains
    assert max(mains.values()) < MAX_MAIN_LINES
