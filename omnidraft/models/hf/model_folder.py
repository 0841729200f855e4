"""Write a model as a Hugging Face folder that other engines load: weights, configuration, and a tokenizer's files."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""The files of tokenizers that transformers knows; a folder has some of them."""
GENERATION = "generation_config.json"
"""The ids that end a text, and the sampling that the model's authors advise: they belong to the tokenizer too."""


def write_folder(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Write the model with the tokenizer of another folder, byte for byte. Raises OSError, SafetensorError."""
    folder.mkdir()
    model.save_pretrained(folder)
    (folder / GENERATION).unlink(missing_ok=True)
    for name in (*TOKENIZER_FILES, GENERATION):
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
