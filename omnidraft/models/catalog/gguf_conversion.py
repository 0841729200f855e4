"""Convert a GGUF file into a folder of bf16 safetensors, configuration and tokenizer.

The weights are the quantised ones, dequantised to bf16. When a model ties its embeddings but its file stores both
matrices (Qwen2.5), both are kept: they were quantised separately, and llama.cpp uses both.
"""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnidraft.models.catalog.gguf_tokenizer import Json, repair_config, repair_tokenizer

UNUSED_TYPE = 5  # llama.cpp's LLAMA_TOKEN_TYPE_UNUSED
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>", "</s>", "<|eot_id|>")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about the tokenizer in a GGUF file that transformers does not read."""

    flavour: str
    unused: frozenset[str]


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer into `folder`, ready for `from_pretrained`.

    Needs about two times the size of the bf16 weights in memory.
    """
    logger.info("converting %s", gguf.name)
    with _quiet_transformers():
        _convert_tokenizer(gguf, folder)
        _convert_weights(gguf, folder)


def read_tokenizer_facts(gguf: Path) -> TokenizerFacts:
    """Read the tokenizer's flavour and its unused rows."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    kind, architecture = (str(fields[key].contents()) for key in ("tokenizer.ggml.model", "general.architecture"))
    pre = str(fields["tokenizer.ggml.pre"].contents()) if "tokenizer.ggml.pre" in fields else "default"
    types = fields["tokenizer.ggml.token_type"].contents()
    rows = [index for index, token_type in enumerate(types) if token_type == UNUSED_TYPE]
    tokens = fields["tokenizer.ggml.tokens"]
    return TokenizerFacts(
        flavour=pre if kind == "gpt2" else architecture,
        unused=frozenset(str(tokens.contents(row)) for row in rows),
    )


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    facts = read_tokenizer_facts(gguf)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    tokenizer = folder / "tokenizer.json"
    _write(tokenizer, repair_tokenizer(_read(tokenizer), facts.flavour, facts.unused))
    config = folder / "tokenizer_config.json"
    _write(config, repair_config(_read(config)))


def _convert_weights(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = _stop_ids(folder, model.config.eos_token_id)
    model.save_pretrained(folder)


def _stop_ids(folder: Path, end_of_turn: int) -> list[int]:
    """Return the file's own end token, then the others of its tokenizer: a completion ends differently than a chat."""
    tokens = _read(folder / "tokenizer.json")["added_tokens"]
    added = {token["content"]: int(token["id"]) for token in tokens if token["special"]}  # Gemma's </s> is HTML
    others = [added[token] for token in STOP_TOKENS if token in added]
    return list(dict.fromkeys([end_of_turn, *others]))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and logs during a conversion; restore both afterwards.

    One of its bars has no setting, so stderr is discarded too; failures are exceptions.
    """
    from transformers.utils import logging as transformers_logging

    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _read(file: Path) -> Json:
    content: Json = json.loads(file.read_text(encoding="utf-8"))
    return content


def _write(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
