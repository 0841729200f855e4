"""Every way of drafting inside vLLM that is compared has its configuration."""

from pathlib import Path

import pytest

from omnidraft import config
from pipelines.bench.throughput import systems
from pipelines.lib import vllm_methods
from pipelines.lib.vllm_server import PROPOSER


def test_every_method_is_another_one(tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    settings = config.load(None, {}, models={"drafter": str(tiny_models[1])})
    methods = {name: vllm_methods.speculation(name, settings, tmp_path, num_tokens=7) for name in vllm_methods.NAMES}
    assert methods["vllm"] == (None, {})
    assert methods["vllm-ngram"][0]["method"] == "ngram"
    assert methods["vllm-suffix"][0]["method"] == "suffix"
    assert (
        methods["vllm-tli"][0] | {"model": str(tiny_models[1]), "use_heterogeneous_vocab": True}
        == methods["vllm-tli"][0]
    )
    ours, traced = methods["vllm+omnidraft"], methods["vllm+omnidraft+traces"]
    assert ours[0] == traced[0] == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 7}
    assert (ours[1]["OMNIDRAFT_RECORDER__ENABLED"], traced[1]["OMNIDRAFT_RECORDER__ENABLED"]) == ("false", "true")
    assert set(vllm_methods.NAMES) < set(systems.NAMES)


@pytest.mark.parametrize("snapshot", [None, "champion"])
def test_a_named_snapshot_comes_from_the_registry_of_the_settings(snapshot: str | None, tmp_path: Path) -> None:
    settings = config.load(None, {}, registry={"url": f"directory://{tmp_path}/own"})
    _, environment = vllm_methods.speculation("vllm+omnidraft", settings, tmp_path, num_tokens=7, snapshot=snapshot)
    assert environment.get("OMNIDRAFT_WORKER__SNAPSHOT") == snapshot
    assert (environment["MLFLOW_TRACKING_URI"] == settings.registry.url) is (snapshot is not None)
