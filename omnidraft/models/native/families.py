"""The families of decoders that the kernels know, a row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where a family differs from Llama; names are those of a layer's modules."""

    norm: str | None = "input_layernorm"
    post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    post_mlp_norm: str | None = None
    post_input_norm: str | None = None
    post_dense_norm: str | None = None
    """Of what the MLP beside experts gives."""
    expert_norm: str | None = None
    post_expert_norm: str | None = None
    attention: str = "self_attn"
    mlp: str = "mlp"
    adds_one: bool = False
    """Whether a norm multiplies by its weight plus 1."""
    is_paired: bool = False
    """Whether neighbours are rotated, instead of values half a head apart."""
    norms_rotated: bool = False
    """Whether queries and keys are rotated before they are normed."""
    is_parallel: bool = False
    scores_are_sigmoid: bool = False
    """Whether the scores of experts are sigmoids, instead of a softmax."""
    is_transposed: bool = False
    """Whether experts have their inputs first, and channels of gate and input matrix in turns."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    is_unrotated: Callable[[Any, int], bool] = lambda config, layer: False
    """Whether a layer has no rotation."""


def _sees_all(config: Any, layer: int) -> bool:
    """Whether a layer sees all positions in a model of windows."""
    return bool(config.sliding_window and config.layer_types[layer] == "full_attention")


_NORMS_BEHIND: Mapping[str, Any] = {
    "norm": None, "post_norm": "post_attention_layernorm",
    "mlp_norm": None, "post_mlp_norm": "post_feedforward_layernorm",
}  # fmt: skip
_FOUR_NORMS: Mapping[str, Any] = {
    "post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LLAMA = Family()
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "ministral", "ministral3", "phi3", "granite"), _LLAMA),
    **dict.fromkeys(("starcoder2", "seed_oss", "cwm", "arcee", "qwen3_moe", "mixtral", "olmoe", "qwen2_moe"), _LLAMA),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen3_vl_text", "internlm3", "jais2", "stablelm"), _LLAMA),
    "granitemoehybrid": Family(mlp="shared_mlp"),
    "smollm3": Family(is_unrotated=lambda config, layer: not config.no_rope_layers[layer]),
    "vaultgemma": Family(mlp_norm="pre_feedforward_layernorm", adds_one=True, scales_embeddings=True),
    "gemma": Family(adds_one=True, scales_embeddings=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(**_FOUR_NORMS, adds_one=True, scales_embeddings=True)),
    "gemma4_text": Family(
        **_FOUR_NORMS, scales_embeddings=True, post_input_norm="post_per_layer_input_norm",
        post_dense_norm="post_feedforward_layernorm_1", expert_norm="pre_feedforward_layernorm_2",
        post_expert_norm="post_feedforward_layernorm_2",
    ),
    **dict.fromkeys(("olmo2", "olmo3"), Family(**_NORMS_BEHIND)),
    "exaone4": Family(**_NORMS_BEHIND, is_unrotated=_sees_all),
    "hunyuan_v1_dense": Family(norms_rotated=True),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "helium", "glm"), Family(is_paired=True)),
    "glm4": Family(
        is_paired=True, post_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm",
    ),
    "cohere": Family(is_paired=True, is_parallel=True, mlp_norm="input_layernorm"),
    "cohere2": Family(is_paired=True, is_parallel=True, mlp_norm="input_layernorm", is_unrotated=_sees_all),
    "gpt_oss": Family(is_transposed=True),
    "nemotron": Family(adds_one=True),
    **dict.fromkeys(
        ("glm4_moe", "dots1", "solar_open", "minimax_m2"), Family(scores_are_sigmoid=True),
    ),
    "exaone_moe": Family(scores_are_sigmoid=True, is_unrotated=_sees_all),
    "falcon": Family(attention="self_attention", is_parallel=True, norm="ln_attn", mlp_norm="ln_mlp"),
}  # fmt: skip
"""By the `model_type` of a configuration. What is not here runs in transformers."""
