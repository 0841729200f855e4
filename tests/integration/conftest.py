"""The environment of pipelines that run in the test's process."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.cli_runs import Environ, tiny_pair_environ


@pytest.fixture
def pipeline_environ(
    omnidraft_home: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Environ]:
    """It has named the tiny models already. The number of threads is afterwards what it was."""

    def choose(chosen: Mapping[str, str]) -> None:
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)

    own = {"OMNIDRAFT_LEARNER__THREADS": "1", "COLUMNS": "160"}
    choose(tiny_pair_environ(omnidraft_home, tiny_models) | own)
    threads = torch.get_num_threads()
    yield choose
    torch.set_num_threads(threads)
