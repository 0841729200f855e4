"""Tiny models that vLLM's kernels take, and servers over them."""

import sys
from pathlib import Path

import pytest

from tests.homes import make_home

pytest.importorskip("vllm", reason="vLLM is in a virtual environment of its own: make test-vllm")

VENV = Path(sys.prefix)
HIDDEN_SIZE = 128
"""Heads of 32: vLLM's attention on processors takes no smaller ones."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our caches, apart from the user's."""
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omnidraft.testing import tiny_models

    return tiny_models.make_target(tmp_path_factory.mktemp("models") / "target", hidden_size=HIDDEN_SIZE, spread=0.3)


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omnidraft.testing import tiny_models

    return tiny_models.make_drafter(tmp_path_factory.mktemp("models") / "drafter")
