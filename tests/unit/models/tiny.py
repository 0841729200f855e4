"""Tiny models of real architectures with random weights."""

import copy
from functools import lru_cache

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from omnidraft.models import precision as precisions
from omnidraft.models.hf.padded_session import PassShape
from omnidraft.models.hf.target import TransformersTarget

VOCAB_SIZE = 300
WINDOW = 5
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=WINDOW),
}
PASSES = PassShape(width=4, prefill_rows=8, capacity_step=64)


@lru_cache(maxsize=32)
def tiny_model(name: str, precision: str = "float32") -> PreTrainedModel:
    """The same weights in every precision."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])  # a model's attention is changed there
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.requires_grad_(False)
    return precisions.apply(model, precision)  # type: ignore[return-value]


def tiny_target(name: str, precision: str = "float32", shape: PassShape = PASSES) -> TransformersTarget:
    return TransformersTarget(tiny_model(name, precision), shape, name=name, precision=precision)


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def whole_pass(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The logits after every id of a text in one plain transformers call without any cache. [S, V]"""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
