"""Tiny models of the families that the kernels know, with what their real models have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 300
_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_S, _F = "sliding_attention", "full_attention"
_WINDOWS = {"head_dim": 16, "sliding_window": 12, "layer_types": [_S, _S, _S, _F]}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.0625,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 12}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}


@dataclass(frozen=True)
class Tiny:
    """A model type, and where its tiny model differs from the others."""

    model_type: str
    changes: Mapping[str, Any]


def tiny(model_type: str, /, **changes: Any) -> Tiny:
    return Tiny(model_type, changes)


FAMILIES: Mapping[str, Tiny] = {
    "Llama 2": tiny("llama", num_key_value_heads=4),
    "Llama 3": tiny("llama", rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True),
    "Llama with biases": tiny("llama", attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "Qwen2": tiny("qwen2", tie_word_embeddings=True),
    "Qwen2 with a window": tiny("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=2),
    "Qwen3": tiny("qwen3", head_dim=32, tie_word_embeddings=True),
    "Mistral": tiny("mistral", sliding_window=None, head_dim=16),
    "Mistral 7B v0.1": tiny("mistral", sliding_window=12),
    "Ministral": tiny("ministral", **_WINDOWS),
    "Ministral 3": tiny(
        "ministral3", sliding_window=None, head_dim=16,
        rope_parameters={**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "Gemma": tiny("gemma", head_dim=16, num_key_value_heads=1, tie_word_embeddings=True),
    "Gemma 2": tiny(
        "gemma2", head_dim=16, sliding_window=12, query_pre_attn_scalar=16, final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
    ),
    "Gemma 3": tiny("gemma3_text", query_pre_attn_scalar=16, **_WINDOWS),
    "Gemma 4 E2B": tiny(
        "gemma4_text", num_hidden_layers=6, layer_types=[_S, _F] * 3, num_kv_shared_layers=2, use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=32, final_logit_softcapping=3.0, **_GEMMA4,
    ),
    "Gemma 4 31B": tiny(
        "gemma4_text", num_kv_shared_layers=0, hidden_size_per_layer_input=0, num_global_key_value_heads=1,
        attention_k_eq_v=True, layer_types=[_S, _S, _S, _F], **_GEMMA4,
    ),
    "Gemma 4 26B": tiny(
        "gemma4_text", num_kv_shared_layers=0, hidden_size_per_layer_input=0, num_global_key_value_heads=1,
        attention_k_eq_v=True, layer_types=[_S, _S, _S, _F], enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=48, **_GEMMA4,
    ),
    "Phi-3": tiny("phi3", sliding_window=12),
    "Phi-4": tiny("phi3", sliding_window=None, hidden_size=128, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, partial_rotary_factor=0.5),
    "Phi-4-mini": tiny(
        "phi3", hidden_size=128, sliding_window=None, partial_rotary_factor=0.5, original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0,
            "short_factor": [1.0 + 0.02 * i for i in range(8)], "long_factor": [1.5 + 0.1 * i for i in range(8)],
            "original_max_position_embeddings": 64,
        },
    ),
    "InternLM2 as Llama": tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "OLMo 2": tiny("olmo2"),
    "OLMo 3": tiny("olmo3", **_WINDOWS),
    "Granite 3": tiny("granite", tie_word_embeddings=True, **_GRANITE),
    "Granite 4": tiny(
        "granitemoehybrid", num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=128,
        layer_types=["attention"] * 4, position_embedding_type="rope", **_GRANITE,
    ),
    "SmolLM3": tiny(
        "smollm3", no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "Cohere 2": tiny("cohere2", logit_scale=0.25, **_WINDOWS),
    "GLM-4": tiny("glm", head_dim=32, partial_rotary_factor=0.5, attention_bias=True),
    "GLM-4 0414": tiny("glm4", head_dim=32, partial_rotary_factor=0.5, attention_bias=True),
    "EXAONE 4": tiny("exaone4", sliding_window_pattern="LLLG", **_WINDOWS),
    "EXAONE 4 1.2B": tiny("exaone4", sliding_window=None, layer_types=[_F] * 4, head_dim=16, tie_word_embeddings=True),
    "Hunyuan": tiny("hunyuan_v1_dense", head_dim=16, use_qk_norm=True),
    "ERNIE 4.5": tiny("ernie4_5", head_dim=16, tie_word_embeddings=True),
    "Seed-OSS": tiny("seed_oss", head_dim=16),
    "StarCoder2": tiny("starcoder2", sliding_window=12, use_bias=True),
    "Falcon 7B": tiny(
        "falcon", num_kv_heads=1, multi_query=True, parallel_attn=True, alibi=False, new_decoder_architecture=False,
    ),
    "Falcon 40B": tiny("falcon", num_kv_heads=2, new_decoder_architecture=True, alibi=False),
    "CWM": tiny("cwm", rope_parameters=_LLAMA3_ROPE, **_WINDOWS),
    "Qwen3-MoE": tiny("qwen3_moe", norm_topk_prob=True, head_dim=32, **_EXPERTS),
    "Qwen2-MoE": tiny(
        "qwen2_moe", mlp_only_layers=[1], shared_expert_intermediate_size=64, norm_topk_prob=False, **_EXPERTS,
    ),
    "GLM-4.5": tiny(
        "glm4_moe", head_dim=32, **_ROUTED, first_k_dense_replace=1, use_qk_norm=True, partial_rotary_factor=0.5,
    ),
    "ERNIE 4.5 21B": tiny(
        "ernie4_5_moe", head_dim=16, moe_num_experts=4, moe_k=2, moe_num_shared_experts=2, moe_intermediate_size=32,
        moe_layer_start_index=1, moe_layer_end_index=3, moe_layer_interval=1,
    ),
    "gpt-oss": tiny("gpt_oss", num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN, **_WINDOWS),
    "Mixtral": tiny("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "OLMoE": tiny("olmoe", num_experts=4, num_experts_per_tok=2),
    "VaultGemma": tiny("vaultgemma", head_dim=16, sliding_window=12, query_pre_attn_scalar=16),
    "InternLM3": tiny("internlm3", head_dim=16),
    "Jais 2": tiny("jais2"),
    "StableLM 2": tiny("stablelm", head_dim=None, hidden_size=128, partial_rotary_factor=0.5, use_qkv_bias=True),
    "Command R": tiny("cohere", logit_scale=0.0625, use_qk_norm=False),
    "dots.llm1": tiny("dots1", head_dim=16, **_ROUTED, first_k_dense_replace=1, sliding_window=12),
    "Solar Open": tiny("solar_open", head_dim=16, **_ROUTED),
    "K-EXAONE": tiny("exaone_moe", num_experts=8, num_shared_experts=1, **_ROUTED, **_WINDOWS),
    "MiniMax M2": tiny("minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=32, rotary_dim=16),
    "Arcee": tiny("arcee"),
    "Helium": tiny("helium", head_dim=16),
    "Nemotron": tiny("nemotron", partial_rotary_factor=0.5, head_dim=32),
}  # fmt: skip


@lru_cache(maxsize=4)
def family_model(name: str) -> PreTrainedModel:
    """The model of a family with weights of bfloat16, in float32."""
    tiny = FAMILIES[name]
    config = family_config(tiny.model_type, tiny.changes)
    return with_spread(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).to(torch.bfloat16).float()


def family_config(model_type: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **{**_BASE, **changes})


def with_spread(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights whose spread makes attention, experts and logits clear-cut."""
    draws = torch.Generator().manual_seed(1)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        noise = torch.randn(parameter.shape, generator=draws)
        if parameter.dim() > 1:
            parameter.copy_(noise * (1.0 if "embed" in name else 1.3 / parameter.shape[-1] ** 0.5))
        else:
            parameter.add_(noise * 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=draws) * 0.3)
    return model
