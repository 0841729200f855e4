"""Tiny Qwen2 and Llama models as GGUF files, written tensor by tensor, and a file for its tokenizer alone."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    model: PreTrainedModel, file: Path, tokens: Sequence[str] | None = None, types: Sequence[int] | None = None
) -> Path:
    """A Qwen2 model in float32; without tokens, a file that has no vocabulary but its size.

    A Llama's queries and keys are in the order of transformers, so its file is good for its names and shapes only."""
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, tokens, types)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(_gguf_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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


def write_scaled_gguf(file: Path) -> list[str]:
    """A Llama's file that scales its rotary frequencies, without weights; its tokens, the last of which ends a text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|eot_id|>"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_tensor("rope_freqs.weight", np.full(2, 8, np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: Sequence[str] | None, types: Sequence[int] | None) -> None:
    if tokens is None or types is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])  # llama.cpp asks for some; nothing is tokenised with them


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{kind}"
