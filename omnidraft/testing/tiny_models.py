"""Tiny random models with real tokenizers, saved as model folders, for tests and the soak without a hub."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "How many clips did Natalia sell altogether in April and May? Answer with a number.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12. Unicode: \u4f60\u597d \u00e9\u00e8\u00fc \U0001f600 \u20ac.",
]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
"""Sizes of target and drafter."""


def make_target(
    folder: Path, *, seed: int = 0, spread: float = 0.02, vocab_size: int = 420, hidden_size: int = 64
) -> Path:
    """Save a two-layer Qwen2 of a few hundred tokens. A higher `spread` of its weights makes its texts more random;
    another `vocab_size` makes another tokenizer. Its four heads share the hidden size."""
    tokenizer = _tokenizer(TEXT, vocab_size=vocab_size)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=448,
        **SIZES | {"hidden_size": hidden_size},
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        initializer_range=spread,
    )
    return _save(folder, Qwen2ForCausalLM(config), tokenizer)


def make_drafter(folder: Path, *, seed: int = 1, hidden_size: int = 64) -> Path:
    """Save a two-layer Llama with another, smaller vocabulary. Its four heads share the hidden size."""
    tokenizer = _tokenizer(TEXT[:2], vocab_size=330)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **SIZES | {"hidden_size": hidden_size},
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        tie_word_embeddings=True,
    )
    return _save(folder, LlamaForCausalLM(config), tokenizer)


def _tokenizer(texts: list[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def _save(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder
