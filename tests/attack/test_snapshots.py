"""Snapshots that are sound in form and signed, and whose weights are none: they change no text and end no worker."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omnidraft import assembly
from omnidraft.assembly.fleet import base_weights
from omnidraft.decode.generation import GenerationRequest
from omnidraft.ports import Sampling
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.tiny_fleet import PROMPT, fleet_settings

Weights = dict[str, torch.Tensor]
BAD: dict[str, tuple[Callable[[Weights], Weights], bool]] = {
    "as it was": (lambda weights: weights, True),
    "nan": (lambda weights: {name: torch.full_like(each, torch.nan) for name, each in weights.items()}, True),
    "infinite": (lambda weights: {name: torch.full_like(each, torch.inf) for name, each in weights.items()}, True),
    "huge": (lambda weights: {name: torch.full_like(each, 1e38) for name, each in weights.items()}, True),
    "another shape": (lambda weights: {name: each[:-1].contiguous() for name, each in weights.items()}, False),
    "whole numbers": (lambda weights: {name: each.to(torch.int32) for name, each in weights.items()}, True),
    "one tensor less": (lambda weights: dict(list(weights.items())[1:]), False),
    "one tensor more": (lambda weights: weights | {"more": torch.zeros(1)}, False),
    "none": (lambda weights: {}, False),
}
"""Name -> what is done to the weights of the base drafter, and whether they can be served."""


@pytest.mark.drafting_fails
@pytest.mark.parametrize("name", BAD)
def test_weights_that_are_none_change_no_text(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    settings = fleet_settings(tiny_models, tmp_path)
    registry = assembly.registry(settings)
    learner = assembly.distillation(settings, CountingMetrics(), folder=tmp_path / "distiller")
    learner.run(lambda: bool(registry.versions()))
    base, (change, is_servable) = registry.resolve("latest"), BAD[name]
    ngrams = registry.fetch(base.version, tmp_path / "fetched", ("serving",)) / bundle.NGRAMS
    told = base.manifest.model_copy(
        update={"snapshot_id": "bad", "parent_id": base.manifest.snapshot_id, "train": "full"}
    )
    weights = change(dict(base_weights(settings, assembly.vocabularies(settings))))
    bundle.write(tmp_path / "bad", told, {bundle.NGRAMS: ngrams, bundle.DRAFTER: weights})
    registry.publish(tmp_path / "bad", base.version)
    registry.promote(2)
    (served,) = assembly.worker(settings, metrics := CountingMetrics()).served

    def text(num_draft_tokens: int, seed: int) -> str:
        sampling = Sampling(temperature=1.0)
        asked = GenerationRequest(
            prompt=PROMPT, max_new_tokens=24, sampling=sampling, seed=seed, num_draft_tokens=num_draft_tokens
        )
        return "".join(step.text for step in served.engine.stream(asked).steps)

    assert served.updater is not None
    served.updater.step(threading.Event())
    assert (served.engine.slot.current.version == 2) is is_servable
    assert (
        metrics.value("omnidraft_snapshot_load_failures_total", target=settings.models.target) > 0
    ) is not is_servable
    assert [text(5, seed) for seed in range(4)] == [text(0, seed) for seed in range(4)]
