"""Tiny configurations of the decoder families of transformers, each with what its real models have.

Those that the kernels know are in tests/unit/models/native/families.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.unit.models.native import families as native
from tests.unit.models.native.families import Tiny, tiny, with_spread

_S, _F, _L = "sliding_attention", "full_attention", "linear_attention"
_MIXED = {"sliding_window": 12, "layer_types": [_S, _S, _S, _F], "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
_DEEPSEEK = {**_LATENT, **_ROUTED, "first_k_dense_replace": 1}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_DELTA = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": [_L, _L, _L, _F],
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.5 + 0.1 * i for i in range(8)], "original_max_position_embeddings": 64, "factor": 4.0,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [], "num_position_embeddings": 16,
}  # fmt: skip
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id")
_IMAGE_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


THROUGH_TRANSFORMERS: Mapping[str, Tiny] = {
    "Gemma 3n": tiny(
        "gemma3n_text", head_dim=16, sliding_window=12, num_hidden_layers=6, layer_types=[_S, _F] * 3,
        num_kv_shared_layers=2, vocab_size_per_layer_input=300, hidden_size_per_layer_input=16, altup_num_inputs=2,
        laurel_rank=8, activation_sparsity_pattern=[0.5, *[0.0] * 5],
    ),
    "Llama 4": tiny(
        "llama4_text", head_dim=16, intermediate_size_mlp=128, num_local_experts=2, num_experts_per_tok=1,
        interleave_moe_layer_step=2, attention_chunk_size=32, no_rope_layers=[1, 1, 1, 0],
    ),
    "Llama with heads of 24": tiny("llama", head_dim=24),
    "Apertus": tiny("apertus"),
    "Phi-2": tiny("phi", partial_rotary_factor=0.5, num_key_value_heads=4),
    "Phi-3.5-MoE": tiny(
        "phimoe", num_local_experts=4, num_experts_per_tok=2, sliding_window=None, attention_bias=True,
        lm_head_bias=True, original_max_position_embeddings=64,
        rope_parameters={**_LONGROPE, "short_mscale": 1.2, "long_mscale": 1.8},
    ),
    "Granite 3 MoE": tiny("granitemoe", num_local_experts=4, num_experts_per_tok=2, logits_scaling=6.0),
    "Granite MoE shared": tiny(
        "granitemoeshared", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64,
    ),
    "OLMo": tiny("olmo", clip_qkv=8.0),
    "Cohere": tiny("cohere", logit_scale=0.0625, use_qk_norm=True),
    "Falcon with ALiBi": tiny(
        "falcon", alibi=True, new_decoder_architecture=False, multi_query=False, parallel_attn=False,
    ),
    "GPT-2": tiny("gpt2", **_GPT),
    "Pythia": tiny("gpt_neox", rotary_pct=0.25),
    "GPT-Neo": tiny(
        "gpt_neo", num_layers=4, num_heads=4, window_size=12, attention_types=[[["global", "local"], 2]],
    ),
    "GPT-J": tiny("gptj", **_GPT, rotary_dim=8),
    "StarCoder": tiny("gpt_bigcode", **_GPT),
    "CodeGen": tiny("codegen", **_GPT, n_ctx=512, rotary_dim=8),
    "BLOOM": tiny("bloom", n_layer=3, n_head=4, max_position_embeddings=None),
    "MPT": tiny("mpt", d_model=64, n_heads=4, n_layers=3, max_seq_len=512, max_position_embeddings=None),
    "OPT": tiny("opt", ffn_dim=128, word_embed_proj_dim=64),
    "OPT 350M": tiny("opt", ffn_dim=128, word_embed_proj_dim=32, do_layer_norm_before=False),
    "XGLM": tiny("xglm", d_model=64, num_layers=3, attention_heads=4, ffn_dim=128, pad_token_id=1),
    "BioGPT": tiny("biogpt"),
    "StableLM 2 12B": tiny("stablelm", partial_rotary_factor=0.25, qk_layernorm=True, use_parallel_residual=True),
    "Persimmon": tiny("persimmon"),
    "DeepSeek V2": tiny("deepseek_v2", **_DEEPSEEK | {"q_lora_rank": None}, topk_method="greedy"),
    "DeepSeek V3": tiny("deepseek_v3", **_DEEPSEEK),
    "DeepSeek V3.2": tiny(  # whose real models have 64 heads; where all of a few are silent, what is chosen ties
        "deepseek_v32", **_DEEPSEEK, index_topk=8, index_head_dim=16, index_n_heads=16,
    ),
    "MiniCPM3": tiny("minicpm3", **_LATENT),
    "GLM-4.7-Flash": tiny("glm4_moe_lite", **_DEEPSEEK),
    "Hunyuan A13B": tiny("hunyuan_v1_moe", head_dim=16, num_experts=4, moe_topk=[2] * 4),
    "BitNet": tiny("bitnet"),
    "DBRX": tiny(
        "dbrx", d_model=64, n_heads=4, n_layers=3, max_seq_len=512,
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    ),
    "DiffLlama": tiny("diffllama"),
    "nanochat": tiny("nanochat"),
    "Trinity": tiny("afmoe", **_EXPERTS, head_dim=16, sliding_window=12, num_dense_layers=1, num_shared_experts=1),
    "FlexOlmo": tiny("flex_olmo", num_experts=4, num_experts_per_tok=2),
    "LongCat": tiny(
        "longcat_flash", **_LATENT, head_dim=8, n_routed_experts=4, moe_topk=2, zero_expert_num=1,
        expert_ffn_hidden_size=48, ffn_hidden_size=96, num_layers=2,
    ),
    "MiMo V2 Flash": tiny(
        "mimo_v2_flash", head_dim=24, v_head_dim=16, swa_head_dim=24, swa_v_head_dim=16, **_EXPERTS, n_routed_experts=4,
        num_local_experts=4, sliding_window=12, n_group=1, topk_group=1, layer_types=[_F, _S, _S, _S],
        swa_num_attention_heads=4, swa_num_key_value_heads=2,
    ),
    "Laguna": tiny(
        "laguna", head_dim=16, **_EXPERTS, sliding_window=12, shared_expert_intermediate_size=48,
        layer_types=[_S, _F, _S, _F], num_attention_heads_per_layer=[4] * 4,
    ),
    "HyperCLOVA X": tiny("hyperclovax"),
    "Youtu-LLM": tiny("youtu", **_LATENT, head_dim=8),
    "JetMoE": tiny("jetmoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=16, num_key_value_heads=2),
    "Doge": tiny("doge"),
    "Ettin": tiny("modernbert-decoder", local_attention=12),
}  # fmt: skip
RECURRENT: Mapping[str, Tiny] = {
    "Qwen3-Next": tiny("qwen3_next", **_EXPERTS, **_DELTA, shared_expert_intermediate_size=48),
    "Qwen3.5": tiny("qwen3_5_text", **_DELTA),
    "Qwen3.5 MoE": tiny("qwen3_5_moe_text", **_EXPERTS, **_DELTA, shared_expert_intermediate_size=48),
    "Granite 4-H": tiny(
        "granitemoehybrid", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64, mamba_n_heads=8,
        mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=16,
        layer_types=["mamba", "mamba", "mamba", "attention"], position_embedding_type=None,
    ),
    "LFM2": tiny("lfm2", layer_types=["conv", "conv", _F, _F], conv_L_cache=3, block_ff_dim=128),
    "LFM2 MoE": tiny("lfm2_moe", layer_types=["conv", "conv", _F, _F], **_EXPERTS, num_dense_layers=1),
    "Nemotron-H": tiny(
        "nemotron_h", layers_block_type=["mamba", "attention", "mamba", "mlp"], head_dim=16, mamba_num_heads=8,
        mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=16,
    ),
    "Falcon-H1": tiny(
        "falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16,
        head_dim=16,
    ),
    "Mamba": tiny("mamba", state_size=8, num_hidden_layers=3),
    "Mamba 2": tiny("mamba2", state_size=8, num_hidden_layers=3, num_heads=8, head_dim=16, n_groups=1, chunk_size=16),
    "Falcon Mamba": tiny("falcon_mamba", state_size=8, num_hidden_layers=3),
    "Jamba": tiny(
        "jamba", num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=8, use_mamba_kernels=False,
    ),
    "Bamba": tiny(
        "bamba", mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16, attn_layer_indices=[1, 3],
        partial_rotary_factor=0.5,
    ),
    "Zamba 2": tiny(
        "zamba2", mamba_d_state=16, n_mamba_heads=4, mamba_headdim=32, chunk_size=16, num_mem_blocks=1,
        hybrid_layer_ids=[1, 3], layers_block_type=["mamba", "hybrid"] * 2, attention_head_dim=32,
    ),
    "RecurrentGemma": tiny("recurrent_gemma", num_hidden_layers=3, lru_width=64, attention_window_size=12),
    "RWKV-4": tiny("rwkv", attention_hidden_size=64, num_hidden_layers=3, context_length=512),
    "xLSTM": tiny("xlstm", num_hidden_layers=2, num_heads=4, chunk_size=16, qk_dim_factor=1.0),
    "Kimi-Linear": tiny(
        "kimi_linear", **_DEEPSEEK, head_dim=16, num_experts=4, num_experts_per_token=2, linear_num_heads=4,
        linear_head_dim=16, layer_types=[_L, _L, _L, _F],
    ),
    "MiniMax-Text-01": tiny(
        "minimax", num_local_experts=4, num_experts_per_tok=2, head_dim=16, layer_types=[_L, _F, _L, _F], block_size=16,
    ),
}  # fmt: skip
WITH_IMAGES: Mapping[str, tuple[str, str]] = {
    "Gemma 3 4B": ("gemma3", "Gemma 3"),
    "Gemma 4 with images": ("gemma4", "Gemma 4 E2B"),
    "Mistral Small 3.1": ("mistral3", "Mistral"),
    "Ministral 3 with images": ("mistral3", "Ministral 3"),
    "Qwen2.5-VL": ("qwen2_5_vl", "Qwen2"),
    "Qwen3-VL": ("qwen3_vl", "Qwen3"),
    "Qwen3.5 with images": ("qwen3_5", "Qwen3.5"),
    "Llama 4 with images": ("llama4", "Llama 4"),
    "LLaVA": ("llava", "Llama 2"),
}
"""The model type around a family's text model."""
OF_TEXT: Mapping[str, Tiny] = {**native.FAMILIES, **THROUGH_TRANSFORMERS, **RECURRENT}
FAMILIES = (*OF_TEXT, *WITH_IMAGES)


def make_model(name: str, **changes: Any) -> PreTrainedModel:
    """The model of a family with random weights of bfloat16, in float32."""
    whole, text = WITH_IMAGES.get(name, (None, name))
    tiny = OF_TEXT[text]
    own = {**changes, **tiny.changes}
    if "vocab_size_per_layer_input" in own:
        own["vocab_size_per_layer_input"] = own.get("vocab_size", native.VOCAB_SIZE)
    config = native.family_config(tiny.model_type, own)
    if whole is not None:
        parts = config.to_dict()
        if whole in ("qwen2_5_vl", "qwen3_vl"):
            parts |= {"rope_parameters": _IMAGE_ROPE, "model_type": f"{whole}_text"}
        ends = {key: changes[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in changes}
        of_images = {name: config.vocab_size - 1 - number for number, name in enumerate(_IMAGE_TOKENS)}
        of_images["image_token_index"] = of_images["image_token_id"]
        config = AutoConfig.for_model(whole, text_config=parts, vision_config=dict(_VISION), **of_images, **ends)
    of_text = type(config) in AutoModelForCausalLM._model_mapping
    loader = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_spread(loader.from_config(config, dtype=torch.float32)).to(torch.bfloat16).float()
