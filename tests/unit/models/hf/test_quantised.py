"""Quantised folders are read as the weights that their format means, and run like any other folder."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnidraft.errors import ModelError
from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.hf.target import load_target
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.models.native.target import NativeTarget
from omnidraft.ports import DraftTree
from tests.unit.models.hf.quantised_folders import CASES, save_quantised
from tests.unit.models.tiny import text, tiny_model


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_read_as_the_weights_that_it_means(name: str, tmp_path: Path) -> None:
    meant = dict(causal_lm(save_quantised(CASES[name], tmp_path), dtype=torch.float32).named_parameters())
    found = dict(causal_lm(tmp_path, dtype=torch.float32).named_parameters())
    assert found.keys() == meant.keys()
    for key, weight in found.items():
        torch.testing.assert_close(weight, meant[key], atol=0, rtol=1e-6)


def test_a_quantised_folder_runs_on_our_kernels_and_learns_and_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ordinary = save_quantised(CASES["gptq of 4 bits"], tmp_path)
    with caplog.at_level(logging.INFO, "omnidraft.models.hf.pretrained"):
        target = load_target(tmp_path, name="x", precision="int8", kernels="portable")
    assert [each.getMessage() for each in caplog.records] == [
        f"the weights of {tmp_path.name} are GPTQ of 4 bits: they are read once, as ordinary weights"
    ]
    assert isinstance(target, NativeTarget)
    expected = load_target(ordinary, name="x", precision="int8", kernels="portable")
    prompt = text(12)
    rows = [each.open(prompt, 5, "fast").score(DraftTree.empty(prompt[-1])) for each in (target, expected)]
    assert torch.equal(*rows)
    assert load_trainable(tmp_path, train="full", rank=1, seed=0)


REFUSED: dict[str, dict[str, Any]] = {
    "bitsandbytes of 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
    "bitsandbytes of 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "EXL2 of 4.65 bits": {"quant_method": "exl2", "bits": 4.65},
    "MLX of 4 bits": {"group_size": 64, "bits": 4},
    "HQQ": {"quant_method": "hqq", "quant_config": {}},
    "quanto": {"quant_method": "quanto", "weights": "int8"},
    "torchao": {"quant_method": "torchao"},
    r"AWQ \(gemv\) of 4 bits": {"quant_method": "awq", "bits": 4, "version": "GEMV"},
    r"GPTQ \(marlin\) of 4 bits": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "GPTQ of 3 bits": {"quant_method": "gptq", "bits": 3},
    r"compressed-tensors \(marlin-24\)": {"quant_method": "compressed-tensors", "format": "marlin-24"},
    r"compressed-tensors \(sparse-24-bitmask\)": {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    r"compressed-tensors \(with transforms\)": {"quant_method": "compressed-tensors", "transform_config": {"a": {}}},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_is_not_read_is_named_with_what_to_do(name: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": REFUSED[name]}))
    with pytest.raises(ModelError, match=f"are {name}, which is not read here: give the model in 16 bits") as refused:
        load_target(tmp_path, name="x", precision="float32")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("settings", [None, {"quant_method": "fp8"}], ids=["unnamed", "without steps"])
def test_levels_that_the_configuration_does_not_explain_are_refused(
    dtype: torch.dtype, settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=rf"quantised weights \({name}: [FIU]8\w*\) in a way that its config.json"):
        causal_lm(tmp_path, dtype=torch.float32)
