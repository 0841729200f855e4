"""Models as GGUF files in float32, laid out as llama.cpp's converter does it, and files for their tokenizers alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "ministral3": "mistral3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3", "olmo3": "olmo2", "cohere": "command-r", "hunyuan_v1_dense": "hunyuan-dense",
    "gpt_oss": "gpt-oss", "granitemoehybrid": "granite",
}  # fmt: skip
"""By the type of a model, where they differ."""
_PERMUTED = ("llama", "mistral3", "arcee", "smollm3", "granite")
_ONE_ADDED = ("gemma", "gemma2", "gemma3", "nemotron")


def write_gguf(
    model: PreTrainedModel, file: Path, tokens: Sequence[str] | None = None, types: Sequence[int] | None = None
) -> Path:
    """Without tokens, a file that has no vocabulary but its size."""
    config: Any = model.config
    writer = gguf.GGUFWriter(file, ARCHITECTURES.get(config.model_type, config.model_type))
    _add_settings(writer, config)
    _add_rope(writer, config)
    _add_vocabulary(writer, tokens, types)
    for name, tensor in _tensors(model, writer.arch):
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    return written(writer, file)


def write_gguf_beside(folder: Path) -> Path:
    """NAME.gguf beside the model folder NAME, with the folder's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_known, num_ids = len(tokenizer), model.config.vocab_size
    tokens = [*tokenizer.convert_ids_to_tokens(range(num_known)), *(f"[PAD{i}]" for i in range(num_known, num_ids))]
    special = set(tokenizer.all_special_ids)
    kinds = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL if i < num_known else gguf.TokenType.UNUSED
        for i in range(num_ids)
    ]
    return write_gguf(model, folder.with_name(f"{folder.name}.gguf"), tokens, kinds)


def write_tokenizer_gguf(file: Path, architecture: str = "rwkv7", pre: str = "gpt-2") -> list[str]:
    """A file without weights; its tokens, the last of which ends a text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|eot_id|>"]
    types = [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]
    write_vocabulary(file, architecture, pre, tokens, types, [("a", "b")], eos_token_id=len(tokens) - 1)
    return tokens


def write_vocabulary(
    file: Path,
    architecture: str,
    pre: str,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[Sequence[str]],
    **more: Any,
) -> Path:
    """A file of a byte-level tokenizer.

    Args:
        more: of `tokenizer.ggml`, an id or a switch; of `chat_template`, a text.
    """
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    return written(writer, file)


def written(writer: gguf.GGUFWriter, file: Path) -> Path:
    """Write what was added, and return the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: Sequence[str] | None, types: Sequence[int] | None) -> None:
    if tokens is None or types is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    pairs = ((token[:1], token[1:]) for token in tokens if len(token) > 1)
    merge = next((pair for pair in pairs if {*pair} <= {*tokens}), (tokens[0], tokens[1]))
    writer.add_token_merges([" ".join(merge)])  # llama.cpp asks for some; nothing is tokenised with it


def _add_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    has_experts = getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0)
    added: dict[Callable[[Any], None], Sequence[str]] = {
        writer.add_context_length: ("max_position_embeddings",),
        writer.add_embedding_length: ("hidden_size",),
        writer.add_block_count: ("num_hidden_layers",),
        writer.add_feed_forward_length: ("shared_intermediate_size", "intermediate_size"),
        writer.add_head_count: ("num_attention_heads",),
        writer.add_head_count_kv: ("num_key_value_heads",),
        writer.add_key_length: ("head_dim",),
        writer.add_value_length: ("head_dim",),
        writer.add_layer_norm_rms_eps: ("rms_norm_eps", "norm_eps"),
        writer.add_layer_norm_eps: ("layer_norm_eps", "norm_epsilon", "norm_eps"),
        writer.add_vocab_size: ("vocab_size",),
        writer.add_attention_scale: ("attention_multiplier",),
        writer.add_embedding_scale: ("embedding_multiplier",),
        writer.add_residual_scale: ("residual_multiplier",),
        writer.add_logit_scale: ("logits_scaling", "logit_scale"),
        writer.add_attn_logit_softcapping: ("attn_logit_softcapping",),
        writer.add_final_logit_softcapping: ("final_logit_softcapping",),
        writer.add_parallel_residual: ("use_parallel_residual",),
    }
    if has_experts:
        added |= {
            writer.add_expert_count: ("num_local_experts", "num_experts"),
            writer.add_expert_used_count: ("num_experts_per_tok",),
            writer.add_expert_feed_forward_length: ("moe_intermediate_size", "intermediate_size"),
            writer.add_expert_shared_feed_forward_length: ("shared_expert_intermediate_size",),
        }
    for add, names in added.items():
        value = next((found for name in names if (found := getattr(config, name, None)) is not None), None)
        if value is not None and not (add == writer.add_key_length and writer.arch == "granite"):
            add(value)
    if config.model_type == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_expert_count(0)
        writer.add_ssm_conv_kernel(4)
        writer.add_rope_scaling_finetuned(True)
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and writer.arch not in ("llama", "qwen2", "mistral3", "starcoder2"):
        writer.add_sliding_window(window)
        if writer.arch in ("olmo2", "exaone4", "cohere2", "gpt-oss") and layers is not None:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in layers])


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            if config.model_type == "ministral3":
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", _llama_3_factors(rope, size))
        case "longrope":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            original = rope["original_max_position_embeddings"]
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for kind in ("long", "short"):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _llama_3_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for exponent in np.arange(0, size, 2) / size:
        turns = 8192 / (2 * math.pi * rope["rope_theta"] ** exponent)
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _tensors(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    config: Any = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = model.state_dict()
    for name, tensor in state.items():
        layer, module = (name.split(".")[2], name.split(".")[-2]) if ".layers." in name else ("", "")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            yield from _experts(name, layer, tensor, arch)
        elif name.endswith("shared_mlp.input_linear.weight"):
            yield from zip((f"blk.{layer}.ffn_gate.weight", f"blk.{layer}.ffn_up.weight"), tensor.chunk(2), strict=True)
        elif name.endswith("shared_mlp.output_linear.weight"):
            yield f"blk.{layer}.ffn_down.weight", tensor
        elif ".norms." in name:
            if name.endswith(".norms.0.weight"):
                rows = [each for other, each in state.items() if other.startswith(name.removesuffix("0.weight"))]
                yield f"blk.{layer}.attn_{name.split('.')[4][0]}_norm.weight", torch.stack(rows)
        else:
            if arch in _PERMUTED and module in heads:
                halves = tensor.reshape(heads[module], 2, -1, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            if arch in _ONE_ADDED and name.endswith("norm.weight"):
                tensor = tensor + 1
            found = names.get_name(name, try_suffixes=(".weight", ".bias")) or ""
            yield (found if found.endswith((".weight", ".bias")) else f"{found}.weight"), tensor.squeeze()


def _experts(name: str, layer: str, tensor: torch.Tensor, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    kind = "bias" if name.endswith("_bias") else "weight"
    if arch == "gpt-oss":
        tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
        gate, up = tensor[:, ::2], tensor[:, 1::2]
    else:
        gate, up = tensor.chunk(2, dim=1)
    if "down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.{kind}", tensor
    else:
        yield f"blk.{layer}.ffn_gate_exps.{kind}", gate
        yield f"blk.{layer}.ffn_up_exps.{kind}", up
