"""The environment of pipelines that run in the test's process."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.cli_runs import Environ


@pytest.fixture
def pipeline_environ(
    omnidraft_home: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Environ]:
    """It has named the tiny models already. The number of threads is afterwards what it was."""

    def choose(chosen: Mapping[str, str]) -> None:
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)

    choose(
        {
            "OMNIDRAFT_HOME": str(omnidraft_home),
            "OMNIDRAFT_MODELS__TARGET": str(tiny_models[0]),
            "OMNIDRAFT_MODELS__DRAFTER": str(tiny_models[1]),
            "OMNIDRAFT_MODELS__PRECISION": "float32",
            "OMNIDRAFT_MODELS__DRAFTER_PRECISION": "float32",
            "OMNIDRAFT_LEARNER__THREADS": "1",
            "OMNIDRAFT_DECODE__THREADS": "1",
            "COLUMNS": "160",
        }
    )
    threads = torch.get_num_threads()
    yield choose
    torch.set_num_threads(threads)
