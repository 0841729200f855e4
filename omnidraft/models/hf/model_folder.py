"""Write a model as a Hugging Face folder that other engines load: weights, configuration, and a tokenizer's files."""

import json
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from omnidraft.models.catalog.gguf_conversion import repair_config
from omnidraft.models.hf.tokenizer_cache import fast_tokenizer

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


_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"


def write_folder(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Write the model with the tokenizer of another folder. Raises ModelError, OSError, SafetensorError."""
    folder.mkdir()
    model.save_pretrained(folder)
    (folder / GENERATION).unlink(missing_ok=True)
    for name in (*TOKENIZER_FILES, GENERATION):
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    if _model_type(folder) != _model_type(tokenizer_folder):
        _keep_as_loaded(tokenizer_folder, folder)


def _keep_as_loaded(tokenizer_folder: Path, folder: Path) -> None:
    """Store the tokenizer as transformers loads it there: it rebuilds some by the model's type, another one here."""
    (folder / _JSON).write_text(fast_tokenizer(tokenizer_folder).backend_tokenizer.to_str(), encoding="utf-8")
    config = folder / _CONFIG
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    config.write_text(json.dumps(repair_config(known), ensure_ascii=False), encoding="utf-8")


def _model_type(folder: Path) -> str | None:
    """Return the type of the model in a folder; None where there is a tokenizer alone."""
    config = folder / "config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    model_type: str | None = known.get("model_type")
    return model_type
