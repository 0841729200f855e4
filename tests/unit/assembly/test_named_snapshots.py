"""Snapshots that are named: what is not there is refused at once, and nothing is made where it was looked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.assembly.registries import named_folder
from omnidraft.errors import RegistryError, SnapshotNotFound
from omnidraft.telemetry.metrics import CountingMetrics
from tests.cli_runs import run_cli
from tests.snapshot_folders import make_bundle


def _engine(settings: config.Settings, name: str) -> object:
    return assembly.engine(settings, CountingMetrics(), snapshot=name)


def _worker(settings: config.Settings, name: str) -> object:
    section = settings.worker.model_copy(update={"snapshot": name})
    return assembly.worker(settings.model_copy(update={"worker": section}), CountingMetrics())


def _batching(settings: config.Settings, name: str) -> object:
    section = settings.worker.model_copy(update={"snapshot": name})
    return assembly.batching(settings.model_copy(update={"worker": section}), CountingMetrics(), num_tokens=2)


def _loaded_model(settings: config.Settings, name: str) -> object:
    return assembly.loaded_model(None, None, settings, CountingMetrics(), snapshot=name)


def _folder(settings: config.Settings, name: str) -> object:
    with named_folder(settings, name) as found:
        return found


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    """Those of a fleet whose models are nowhere: looking for them fails with another error."""
    environ = {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db",
        "OMNIDRAFT_REGISTRY__URL": f"directory:///{tmp_path}/registry",
    }
    return config.load(None, environ, models={"target": str(tmp_path / "big"), "drafter": str(tmp_path / "small")})


@pytest.mark.parametrize("use", [_engine, _worker, _batching, _loaded_model, _folder])
def test_a_name_is_refused_where_there_is_no_registry_before_anything_is_loaded(
    use: Callable[[config.Settings, str], object], settings: config.Settings, tmp_path: Path
) -> None:
    with pytest.raises(RegistryError, match=r"there is no registry at .* yet: "):
        use(settings, "champion")
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize("use", [_engine, _worker, _batching, _loaded_model, _folder])
def test_a_name_that_the_registry_does_not_know_is_refused_before_anything_is_loaded(
    use: Callable[[config.Settings, str], object], settings: config.Settings, tmp_path: Path
) -> None:
    models = settings.models
    assembly.registry(settings).publish(make_bundle(tmp_path, target=models.target, drafter=models.drafter), None)
    with pytest.raises(SnapshotNotFound, match="none-such"):
        use(settings, "none-such")


def test_generate_makes_no_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli(("generate", "--prompt", "x", "--snapshot", "none-such"), monkeypatch, capsys, {})
    listed = run_cli(("snapshots", "list"), monkeypatch, capsys, {})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == listed.stderr
    assert "there is no registry at " in done.stderr
    assert list(tmp_path.iterdir()) == []
