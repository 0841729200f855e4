"""A worker connects to its registry after it serves: importing MLflow takes longer than all of its start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnidraft import config
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.errors import RegistryError

STARTS = """
import sys
from omnidraft import config, assembly
from omnidraft.telemetry.metrics import CountingMetrics
worker = assembly.worker(config.load(None), CountingMetrics())
print("mlflow" in sys.modules)
worker.producer.close(5.0)
"""


@pytest.mark.parametrize(
    ("url", "advice"),
    [("http://127.0.0.1:9", "MLFLOW_TRACKING_URI names it"), ("sqlite:////dev/null/mlflow.db", "folder is writable")],
)
def test_an_address_where_nothing_can_be_is_refused_before_anything_is_opened(url: str, advice: str) -> None:
    with pytest.raises(RegistryError, match=f"{url}.*check that .*{advice}"):
        snapshot_reader(config.load(None, {}, registry={"url": url}))


@pytest.mark.long
def test_a_worker_is_ready_before_mlflow_is_imported(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path
) -> None:
    environ = {
        "OMNIDRAFT_HOME": str(omnidraft_home),
        "OMNIDRAFT_MODELS__TARGET": str(tiny_models[0]),
        "OMNIDRAFT_MODELS__DRAFTER": str(tiny_models[1]),
        "OMNIDRAFT_MODELS__PRECISION": "float32",
        "OMNIDRAFT_REGISTRY__URL": f"sqlite:///{tmp_path}/mlflow.db",
        "OMNIDRAFT_LOG__URL": f"sqlite:///{tmp_path}/log.db",
    }
    done = subprocess.run([sys.executable, "-c", STARTS], env=os.environ | environ, capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr
    assert not (tmp_path / "mlflow.db").exists()
