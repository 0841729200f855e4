"""A tokenizer whose tokens are the 256 bytes and the special tokens of another tokenizer, with its chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omnidraft.models.hf.tokenizer_cache import fast_tokenizer


def write_byte_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer beside that of another folder. Raises ModelError where there is none to begin with."""
    old = fast_tokenizer(source)
    special = [token.content for _, token in sorted(old.added_tokens_decoder.items()) if token.special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*special, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=old.chat_template, **old.special_tokens_map
    ).save_pretrained(folder)
