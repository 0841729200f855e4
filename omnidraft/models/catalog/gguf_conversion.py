"""Convert a GGUF file into a folder of bf16 safetensors, configuration and tokenizer.

The weights are the quantised ones, dequantised to bf16. When a model ties its embeddings but its file stores both
matrices (Qwen2.5), both are kept: they were quantised separately, and llama.cpp uses both.
"""

import logging
from pathlib import Path

from omnidraft.errors import model_errors

VERSION = "2"
"""Of what `convert` writes; raise it whenever that changes: what another version made is converted again."""
logger = logging.getLogger(__name__)


def convert(file: Path, folder: Path) -> None:
    """Write the model and its tokenizer into `folder`, ready for `from_pretrained`.

    Needs the size of the bf16 weights in memory, and a little more. Raises ModelError where a file cannot be read or
    converted, or differs from the class of its model in transformers in its weights.
    """
    from transformers.utils import logging as transformers_logging

    from omnidraft.models.catalog import gguf_config, gguf_file, gguf_tokenizer, gguf_weights
    from omnidraft.models.hf.pretrained import without_weights

    with model_errors(f"{file.name} cannot be converted"):
        logger.info("converting %s", file.name)
        transformers_logging.disable_progress_bar()
        source = gguf_file.GgufFile(file)
        gguf_config.config_of(source).save_pretrained(folder)
        model = without_weights(folder)
        gguf_weights.fill(model, source)
        model.save_pretrained(folder)
        gguf_tokenizer.write_tokenizer(source, folder)


def convert_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer alone into `folder`, for a model that another engine runs. Raises ModelError where a file
    cannot be read or converted."""
    from omnidraft.models.catalog import gguf_file, gguf_tokenizer

    with model_errors(f"{file.name} cannot be converted"):
        source = gguf_file.GgufFile(file)
        gguf_tokenizer.write_tokenizer(source, folder)
        vocab_size = len(source.needed("tokenizer.ggml.tokens"))
        (folder / "config.json").write_text(f'{{"vocab_size": {vocab_size}}}\n', encoding="utf-8")
