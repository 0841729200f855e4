"""A model of an architecture becomes the file that llama.cpp's own converter makes of it, and the file that model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from omnidraft.models.catalog.gguf_conversion import convert
from omnidraft.models.catalog.gguf_file import GgufFile
from omnidraft.models.llamacpp.gguf_export import write_gguf
from tests.unit.models.catalog.converted import CONVERTED, digest, numbered_model, write_without_weights
from tests.unit.models.native.families import VOCAB_SIZE

IDS = torch.arange(40)[None] * 7 % VOCAB_SIZE


@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_is_that_of_llamacpps_converter_and_gives_the_logits_of_its_model(name: str, tmp_path: Path) -> None:
    model = numbered_model(CONVERTED[name]["model_type"], CONVERTED[name]["changes"])
    base = write_without_weights(name, tmp_path / "base.gguf")
    write_gguf(model, base, tmp_path / "tiny.gguf")
    assert digest(GgufFile(tmp_path / "tiny.gguf")) == CONVERTED[name]["sha256"]
    convert(tmp_path / "tiny.gguf", tmp_path / "made")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    torch.testing.assert_close(made(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)


def test_layers_that_draft_for_the_others_are_kept_aside(tmp_path: Path) -> None:
    """GLM-4.5's fifth layer: read past, and copied where the model is written."""
    changes = CONVERTED["GLM-4.5"]["changes"]
    extra = {"blk.4.nextn.eh_proj.weight": [[[4, 8], [0]]]}
    base = write_without_weights("GLM-4.5", tmp_path / "base.gguf", extra)
    write_gguf(numbered_model("glm4_moe", changes), base, tmp_path / "tiny.gguf")
    written = GgufFile(tmp_path / "tiny.gguf")
    assert digest(written) == CONVERTED["GLM-4.5"]["sha256"]
    assert written.tensors.keys() - written.weights.keys() == {"blk.4.nextn.eh_proj.weight"}
    convert(tmp_path / "tiny.gguf", tmp_path / "made")
