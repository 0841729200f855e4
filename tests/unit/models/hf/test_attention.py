"""Attention without copies of the key heads, against transformers' own."""

import copy

import pytest
import torch

from omnidraft.models.hf.attention import share_key_heads
from tests.unit.models.tiny import CONFIGS, text, tiny_model

MASK = torch.tril(torch.ones(1, 1, 9, 9, dtype=torch.bool))


def logits(model, **masks) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text(9)] * 2), use_cache=False, **masks).logits


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_with_a_mask_and_without(name, precision):
    """Without a mask of ours the model makes its own, windows included."""
    theirs, ours = tiny_model(name), copy.deepcopy(tiny_model(name))
    for model in (theirs, ours):
        model.set_attn_implementation("sdpa")
    theirs, ours = (copy.deepcopy(model).to(getattr(torch, precision)) for model in (theirs, ours))
    share_key_heads(ours)
    assert ours.config._attn_implementation != theirs.config._attn_implementation
    assert torch.equal(logits(ours), logits(theirs))
    assert torch.equal(logits(ours, attention_mask=MASK), logits(theirs, attention_mask=MASK))


def test_keys_are_not_copied_for_each_query_head():
    """transformers makes two copies a layer."""
    model = copy.deepcopy(tiny_model("qwen2"))
    model.set_attn_implementation("sdpa")

    def repeats() -> int:
        with torch.profiler.profile(record_shapes=True) as profile:
            logits(model, attention_mask=MASK)
        expanded = [2, 2, 2, 9, 16]  # batch, key heads, query heads of each, positions, head size
        return sum(event.input_shapes[:1] == [expanded] for event in profile.events() if event.name == "aten::clone")

    assert repeats() == 2 * model.config.num_hidden_layers
    share_key_heads(model)
    assert repeats() == 0


def test_a_model_with_attention_of_its_own_is_left_alone():
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("eager")
    model._supports_attention_backend = False  # as GPT-J, CodeGen
    share_key_heads(model)
    assert model.config._attn_implementation == "eager"
