"""The configuration that the settings of a GGUF file make.

A setting that nothing here reads is refused, so that no file is converted to a model that computes otherwise.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_architectures import OTHERWISE, Architecture, Json, architecture_of
from omnidraft.models.catalog.gguf_file import ROPE_TENSORS, GgufFile

_SETTINGS: Mapping[str, Sequence[str]] = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "use_parallel_residual": ("use_parallel_residual",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"),
    "ssm.state_size": ("state_size", "ssm_state_size", "mamba_d_state", "linear_key_head_dim"),
    "ssm.group_count": ("n_groups", "mamba_n_groups", "linear_num_key_heads"),
    "ssm.time_step_rank": (
        "linear_num_value_heads",
        "num_heads",
        "time_step_rank",
        "mamba_dt_rank",
        "mamba_n_heads",
        "mamba_num_heads",
    ),
}
"""What a file calls a setting, and the names for it in transformers, of which the first counts that a class has."""
_READ_ELSEWHERE = (
    "vocab_size", "context_length", "block_count", "feed_forward_length", "expert_shared_count", "nextn_predict_layers",
    "use_parallel_residual", "expert_gating_func", "expert_shared_feed_forward_length", "attention.head_count_kv",
    "full_attention_interval", "attention.recurrent_layers", "attention.shared_kv_layers",
    "embedding_length_per_layer_input", "attention.key_length_swa", "attention.value_length_swa",
    "attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank", "rope.dimension_count_swa",
    "rope.dimension_sections", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.temperature_scale",
    "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
"""What is read elsewhere, or says nothing about any model here that its weights do not."""
_PRESENCE: Mapping[str, Sequence[str]] = {
    "blk.0.attn_q.bias": ("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias"),
    "blk.0.attn_output.bias": ("attention_out_bias",),
    "blk.0.ffn_up.bias": ("mlp_bias",),
    "blk.0.attn_q_norm.weight": ("use_qk_norm", "qk_layernorm"),
}
"""Settings that are true where a file has this tensor."""
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How Llama 3 scales its frequencies, up to a factor."""


def config_of(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration of a file's model. Raises ModelError for a file with settings that are not known."""
    row = architecture_of(file)
    model_type = row.model_type if isinstance(row.model_type, str) else row.model_type(file)
    kind: Any = CONFIG_MAPPING[model_type]
    default = kind()
    known = default.to_dict().keys()
    present = [key for key in _SETTINGS if key in file.settings and key not in row.reads]
    names = {key: name for key in present for name in reversed(_SETTINGS[key]) if name in known}
    _require_known(file, {*names, *row.reads})
    read = {name: file.setting(key) for key, name in names.items()}
    found = {name: tensor in file.tensors for tensor, names in _PRESENCE.items() for name in names}
    tokens = {f"{role}_token_id": file.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    own = {"head_dim": file.head_size, **row.fixed, **row.settings(file)}
    always = {**tokens, "pad_token_id": None, "dtype": torch.bfloat16}
    num_keys = own.get("num_key_value_heads") or file.setting(
        "attention.head_count_kv", file.count("attention.head_count")
    )
    common = {
        "num_hidden_layers": file.num_layers,
        "n_layer": file.num_layers,
        "vocab_size": file.shape("token_embd.weight")[0],
        "num_key_value_heads": num_keys,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if "rope_parameters" not in own and "rope_parameters" in known:
        is_by_layer = "full_attention" in (default.rope_parameters or {})
        common["rope_parameters"] = _rope(file, row, own["head_dim"], is_by_layer)
    if original := file.setting("rope.scaling.original_context_length"):
        common["original_max_position_embeddings"] = original
    settings = {**read, **found, **common, **_windows(file)}
    config: PreTrainedConfig = kind(**{**{name: settings[name] for name in settings if name in known}, **always, **own})
    return config


def _require_known(file: GgufFile, read: Container[str]) -> None:
    """Raise ModelError where a setting of the file is read by nothing, or has no place in the model's class."""
    unknown = [
        key
        for key in file.settings
        if key not in _READ_ELSEWHERE and not key.startswith("ssm.") and key not in read and file.setting(key)
    ]
    if unknown:
        raise ModelError(
            f"{file.name} has settings that are not converted ({', '.join(sorted(unknown)[:3])}); {OTHERWISE}"
        )


def _windows(file: GgufFile) -> Json:
    """Return which layers see how far; nothing of layers where their class knows it."""
    window, pattern = file.setting("attention.sliding_window"), file.settings.get("attention.sliding_window_pattern")
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * file.num_layers}
    if pattern is None:
        return {"sliding_window": window}
    layers = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
    return {"sliding_window": window, "layer_types": layers}


def _rope(file: GgufFile, row: Architecture, head_size: int, is_by_layer: bool) -> Json:
    """Return the rotary parameters, by kind of layer where a class has them so."""
    theta = file.setting("rope.freq_base", 1e4)
    scaled = {"rope_theta": theta, **_scaling(file)}
    share = file.setting("rope.dimension_count", head_size) / head_size
    if share != 1:
        scaled["partial_rotary_factor"] = share
    if not is_by_layer:
        return scaled
    sliding = file.setting("rope.freq_base_swa", row.sliding_theta or theta)
    return {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": sliding}}


def _scaling(file: GgufFile) -> Json:
    """Return how rotary frequencies are scaled. Raises ModelError for a way that is not known."""
    if ROPE_TENSORS[0] in file.tensors:
        return _llama_3(file)
    if ROPE_TENSORS[1] in file.tensors:
        long_factor, short_factor = (file.values(name).tolist() for name in ROPE_TENSORS[1:])
        original = file.count("rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            "long_factor": long_factor,
            "short_factor": short_factor,
            "original_max_position_embeddings": original,
            "factor": file.count("context_length") / original,
        }
    match file.setting("rope.scaling.type", "none"):
        case "none":
            return {"rope_type": "default"}
        case "linear":
            return {"rope_type": "linear", "factor": file.setting("rope.scaling.factor")}
        case "yarn":
            return _yarn(file)
        case kind:
            raise ModelError(f"{file.name} scales its rotary frequencies by {kind!r}, and lacks the factors for it")


def _llama_3(file: GgufFile) -> Json:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = file.values(ROPE_TENSORS[0])
    scaling = {"rope_type": "llama3", "factor": factors.max().item(), **_LLAMA_3}
    theta, size = file.setting("rope.freq_base", 1e4), 2 * len(factors)
    kind: Any = CONFIG_MAPPING["llama"]
    config = kind(rope_parameters={"rope_theta": theta, **scaling}, head_dim=size)
    made, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / theta ** (torch.arange(0, size, 2) / size)
    if not torch.allclose(plain / factors, made, rtol=1e-4, atol=0):
        raise ModelError(
            f"{file.name} scales its rotary frequencies in a way that is not converted ({ROPE_TENSORS[0]}); {OTHERWISE}"
        )
    return scaling


def _yarn(file: GgufFile) -> Json:
    spread = file.setting("rope.scaling.yarn_log_multiplier")
    if spread is not None and file.architecture == "deepseek2":
        spread = round(spread * 10, 6)  # llama.cpp has the factor of the logarithm, transformers ten times that
    found = {
        "factor": file.setting("rope.scaling.factor"),
        "original_max_position_embeddings": file.setting("rope.scaling.original_context_length"),
        "attention_factor": file.setting("rope.scaling.yarn_attn_factor"),
        "beta_fast": file.setting("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.setting("rope.scaling.yarn_beta_slow"),
        "llama_4_scaling_beta": file.setting("attention.temperature_scale"),
        "mscale": spread,
        "mscale_all_dim": spread,
        "truncate": False if file.architecture == "gpt-oss" else None,
    }
    return {"rope_type": "yarn", **{name: value for name, value in found.items() if value is not None}}
