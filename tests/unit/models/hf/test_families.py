"""Families that our kernels do not know run through transformers, exactly: trees, several texts, both modes."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from omnidraft.models.hf.target import TransformersTarget
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.ports import DraftTree
from tests.unit.models.native.families import family_config, with_spread
from tests.unit.models.tiny import PASSES, text

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "head_dim": 16}
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma 4 E2B": ("gemma4_text", {
        **_MIXED, "global_head_dim": 32, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 16, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3}),
    "DeepSeek V3": ("deepseek_v3", {**_LATENT, "q_lora_rank": 24}),
    "GLM-4.5": ("glm4_moe", {
        **_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1}),
    "GPT-J": ("gptj", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "GPT-2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "Cohere": ("cohere", {"logit_scale": 0.0625, "use_qk_norm": True}),
    "MiniMax M2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
}  # fmt: skip
ONE_TEXT_A_PASS = {"DeepSeek V3", "GPT-J"}


@lru_cache(maxsize=2)
def family_model(name: str) -> PreTrainedModel:
    model_type, changes = FAMILIES[name]
    return with_spread(AutoModelForCausalLM.from_config(family_config(model_type, changes), dtype=torch.float32))


def whole_pass(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].float()


@lru_cache(maxsize=2)
def target(name: str) -> TransformersTarget:
    model = family_model(name)
    assert unsupported_reason(model)
    return TransformersTarget(model, PASSES, name=name, precision="float32")


def tree(ids: list[int]) -> DraftTree:
    return DraftTree((ids[-1], 11, 12, 13, 14), (0, 0, 1, 0, 3), (None, *["drafter"] * 4), (0.0,) * 5)


PATHS = ([], [11], [11, 12], [13], [13, 14])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_past_the_window_is_scored_as_its_texts(name):
    model, ids = family_model(name), text(45)
    scores = target(name).open(ids, 10, "fast").score(tree(ids))
    expected = torch.stack([whole_pass(model, [*ids, *path]) for path in PATHS])
    torch.testing.assert_close(scores, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - ONE_TEXT_A_PASS))
def test_two_texts_share_a_pass(name):
    model, ids, other = family_model(name), text(45), text(20, seed=3)
    sessions = [target(name).open(each, 10, "fast") for each in (ids, other)]
    for session in sessions:
        session.score(DraftTree.empty(5))
    scores, one = target(name).forward([(sessions[0], tree(ids)), (sessions[1], DraftTree.empty(other[-1]))])
    torch.testing.assert_close(scores[4], whole_pass(model, [*ids, 13, 14]), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(one[0], whole_pass(model, other), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_reproducible_mode_holds(name):
    target(name).open(text(9), 5, "reproducible")


def test_a_text_model_inside_one_of_images_is_the_target():
    parts = {"text_config": family_config("mistral", {"head_dim": 16}).to_dict(), "vision_config": _VISION}
    config = AutoConfig.for_model("mistral3", **parts, image_token_index=3)
    model = with_spread(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    assert unsupported_reason(model) is None
    ids = text(30)
    scores = TransformersTarget(model, PASSES, name="x", precision="float32").open(ids, 10, "fast").score(tree(ids))
    torch.testing.assert_close(scores[2], whole_pass(model, [*ids, 11, 12]), atol=2e-3, rtol=2e-3)
