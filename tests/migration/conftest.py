"""Files that an earlier release wrote, copied to where a test may change them; README.md says how they were made."""

import shutil
from pathlib import Path

import pytest

from omnidraft import config
from tests.migration.earlier_release import DATA


@pytest.fixture
def deployment(tmp_path: Path, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    """The settings of a copy of the deployment, whose paths are relative to the working directory."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    return config.load(Path("fleet.toml"), {})
