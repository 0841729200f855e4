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
