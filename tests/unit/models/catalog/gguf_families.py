"""Tiny models of the architectures of GGUF files, with what tells their real models apart there."""

from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.unit.models.native.families import FAMILIES, YARN, Tiny, family_config, tiny, with_spread

_LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_BY_LAYER = {
    "full_attention": {**_LINEAR, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
_GEMMA = {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
_MANY = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}


_AS_THERE = (
    "Llama 2", "Qwen2", "Qwen3", "Mistral", "Ministral 3", "Gemma", "Phi-4", "Phi-4-mini", "OLMo 2", "OLMo 3",
    "Granite 3", "Granite 4", "SmolLM3", "GLM-4 0414", "EXAONE 4", "EXAONE 4 1.2B", "Hunyuan", "ERNIE 4.5", "Seed-OSS",
    "Qwen3-MoE", "Mixtral", "OLMoE", "Arcee", "Nemotron",
)  # fmt: skip
GGUF_FAMILIES: Mapping[str, Tiny] = {
    **{name: FAMILIES[name] for name in _AS_THERE},
    "Llama 3.1": tiny("llama", rope_parameters=_LLAMA_3, head_dim=32, tie_word_embeddings=True),
    "Llama, linear": tiny("llama", rope_parameters=_LINEAR),
    "Llama, YaRN": tiny("llama", rope_parameters=YARN),
    "Llama with biases": tiny("llama", attention_bias=True, mlp_bias=True),
    "Mistral Nemo": tiny("mistral", sliding_window=None, head_dim=32),
    "Qwen2-MoE": tiny("qwen2_moe", shared_expert_intermediate_size=80, **_MANY),
    "gpt-oss": tiny(
        "gpt_oss", num_local_experts=4, num_experts_per_tok=2, rope_parameters={**YARN, "truncate": False},
        head_dim=16, sliding_window=12,
    ),
    "Gemma 2": tiny("gemma2", final_logit_softcapping=3.0, attn_logit_softcapping=2.0, **_GEMMA),
    "Gemma 3": tiny("gemma3_text", num_hidden_layers=7, rope_parameters=_BY_LAYER, **_GEMMA),
    "StableLM 3B": tiny("stablelm", use_qkv_bias=True, rope_parameters=_PARTIAL),
    "StableLM 2 12B": tiny("stablelm", qk_layernorm=True, use_parallel_residual=True, rope_parameters=_PARTIAL),
    "Command R+": tiny("cohere", use_qk_norm=True, logit_scale=0.25, tie_word_embeddings=True),
    "Cohere 2": tiny("cohere2", logit_scale=0.25, sliding_window=12, tie_word_embeddings=True),
    "StarCoder2": tiny("starcoder2", use_bias=True, sliding_window=None),
}  # fmt: skip


def gguf_family_model(name: str) -> PreTrainedModel:
    """The model of a family in float32, with weights that bfloat16 has too."""
    tiny = GGUF_FAMILIES[name]
    config = family_config(tiny.model_type, tiny.changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in with_spread(model).parameters():
        parameter.copy_(parameter.bfloat16())
    return model
