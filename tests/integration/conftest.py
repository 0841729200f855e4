"""Settings of the tiny pair: a file for commands, and an environment for pipelines that run in the test's process."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.cli_runs import Environ, tiny_pair_environ


@pytest.fixture
def settings_file(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Path:
    """The tiny pair, a log and a registry below tmp_path."""
    path = tmp_path / "settings.toml"
    path.write_text(f"""
[models]
target = "{tiny_models[0]}"
drafter = "{tiny_models[1]}"
precision = "float32"
drafter_precision = "float32"
[decode]
threads = 1
mode = "reproducible"
[log]
url = "sqlite:///{tmp_path}/log.db"
[registry]
url = "directory:///{tmp_path}/registry"
[worker]
port = 0
""")
    return path


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
