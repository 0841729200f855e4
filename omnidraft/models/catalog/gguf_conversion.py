"""Convert a GGUF file into a folder of bf16 safetensors, configuration and tokenizer.

The weights are the quantised ones, dequantised to bf16. When a model ties its embeddings but its file stores both
matrices (Qwen2.5), both are kept: they were quantised separately, and llama.cpp uses both.

The tokenizer needs repairs: transformers rebuilds it from vocabulary and merges, and knows most pre-tokenizers by the
name in `tokenizer.ggml.pre`. It misses these parts of the original tokenizers:

- `smollm`: digits stand alone before the byte-level split; else "2024" is cut where no merge was learned;
- `qwen2`: text is normalised to NFC;
- `gemma3`: the longest run of spaces, tabs or line ends is merged first, before all other merges;
- unused rows that pad the vocabulary (token type 5) are no tokens: they must neither be read nor spelled.
"""

import contextlib
import io
import json
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from omnidraft.errors import ModelError, model_errors

VERSION = "1"
"""Of what `convert` writes; raise it whenever that changes: folders that an earlier version made are not used."""
UNUSED_TYPE = 5  # llama.cpp's LLAMA_TOKEN_TYPE_UNUSED
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>", "</s>", "<|eot_id|>")
GENERIC_CLASS = "PreTrainedTokenizerFast"  # takes tokenizer.json as it is; a model's own class would rebuild it
RUN_CHARACTERS = "\n\t\u2581"  # U+2581 stands for a space

Json = dict[str, Any]

_CONVERTING = Lock()  # of this process's stderr and of functions that transformers uses
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about the tokenizer in a GGUF file that transformers does not read."""

    flavour: str
    unused: frozenset[str]


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer into `folder`, ready for `from_pretrained`.

    Needs about two times the size of the bf16 weights in memory; one thread converts at a time. Raises ModelError where
    a file cannot be read or converted, or differs from the class of its model in transformers in its weights.
    """
    with _converting(gguf):
        require_plain_rope(gguf)
        _convert_tokenizer(gguf, folder)
        _convert_weights(gguf, folder)


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer and the configuration into `folder`, for a model that another engine runs. Raises ModelError
    where a file cannot be read or converted."""
    from transformers import AutoConfig, GenerationConfig

    with _converting(gguf):
        _convert_tokenizer(gguf, folder)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config.save_pretrained(folder)
        GenerationConfig(eos_token_id=_stop_ids(folder, config.eos_token_id)).save_pretrained(folder)


@contextlib.contextmanager
def _converting(gguf: Path) -> Iterator[None]:
    """Let one thread convert at a time, quickly and silently. Raises ModelError for what transformers raises inside."""
    from omnidraft.models.catalog import gguf_speedups

    with model_errors(f"{gguf.name} cannot be converted"), _CONVERTING, _quiet_transformers(), gguf_speedups.applied():
        logger.info("converting %s", gguf.name)
        yield


def require_plain_rope(gguf: Path) -> None:
    """Raise ModelError where the file scales its rotary frequencies: transformers would read it without the scaling."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    architecture = str(reader.fields["general.architecture"].contents())
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    kind = "none" if scaling is None else str(scaling.contents())
    tensors = [each.name for each in reader.tensors if each.name.startswith("rope_")]
    if architecture != "gpt-oss" and (kind != "none" or tensors):  # its scaling is read
        raise ModelError(
            f"{gguf.name} scales its rotary frequencies ({', '.join(tensors) or kind}), which no conversion of GGUF "
            "files takes over; give the hub id or folder of the same model, or set models.engine = 'llamacpp'"
        )


def require_known_biases(gguf: Path, model: Any) -> None:
    """Raise ModelError where the file has biases that the model lacks: transformers would read it without them."""
    from gguf import GGUFReader

    biases = {each.name: int(each.n_elements) for each in GGUFReader(gguf).tensors if each.name.endswith(".bias")}
    num_known = sum(tensor.numel() for name, tensor in model.state_dict().items() if name.endswith("bias"))
    if sum(biases.values()) > num_known:
        raise ModelError(
            f"{gguf.name} has biases that {type(model).__name__} lacks (among {', '.join(list(biases)[:3])}); give the "
            "hub id or folder of the same model, or set models.engine = 'llamacpp'"
        )


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


def repair_tokenizer(tokenizer: Json, flavour: str, unused: Collection[str]) -> Json:
    """Return the tokenizer as its authors publish it.

    Args:
        tokenizer: the content of `tokenizer.json`.
        flavour: `tokenizer.ggml.pre` of the GGUF file, or its architecture where the vocabulary is SentencePiece.
        unused: the tokens that the GGUF file marks as unused.
    """
    model = _without(tokenizer["model"], unused)
    match flavour:
        case "smollm":
            return tokenizer | {"model": model, "pre_tokenizer": _sequence(_digits(), _byte_level())}
        case "qwen2":
            return tokenizer | {"model": model, "normalizer": {"type": "NFC"}}
        case "gemma3":
            return tokenizer | {"model": model | {"merges": _runs_first(model["merges"])}}
        case _:
            return tokenizer | {"model": model}


def repair_config(config: Json) -> Json:
    """Return the content of `tokenizer_config.json` for a folder that is loaded without the GGUF file."""
    saved = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    return saved | {"tokenizer_class": GENERIC_CLASS}


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
    from transformers import GgufConfig

    from omnidraft.models.hf.pretrained import with_all_weights

    model = with_all_weights(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    require_known_biases(gguf, model)
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


def _without(model: Json, unused: Collection[str]) -> Json:
    removed = set(unused)
    return model | {"vocab": {token: index for token, index in model["vocab"].items() if token not in removed}}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _digits() -> Json:
    return {"type": "Digits", "individual_digits": True}


def _byte_level() -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _runs_first(merges: list[list[str]]) -> list[list[str]]:
    runs = [pair for pair in merges if _is_run(*pair)]
    others = [pair for pair in merges if not _is_run(*pair)]
    return sorted(runs, key=lambda pair: (-len(pair[0]), -len(pair[1]))) + others


def _is_run(left: str, right: str) -> bool:
    return left[0] in RUN_CHARACTERS and set(left + right) == {left[0]}
