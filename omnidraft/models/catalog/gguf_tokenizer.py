"""Repair the `tokenizer.json` that transformers makes from a GGUF file.

transformers rebuilds a tokenizer from vocabulary and merges, and knows most pre-tokenizers by the name in
`tokenizer.ggml.pre`. It misses these parts of the original tokenizers:

- `smollm`: digits stand alone before the byte-level split; else "2024" is cut where no merge was learned;
- `qwen2`: text is normalised to NFC;
- `gemma3`: the longest run of spaces, tabs or line ends is merged first, before all other merges;
- unused rows that pad the vocabulary (token type 5) are no tokens: they must neither be read nor spelled.

Works on the parsed JSON, so it knows no tokenizer library.
"""

from collections.abc import Collection
from typing import Any

GENERIC_CLASS = "PreTrainedTokenizerFast"  # takes tokenizer.json as it is; a model's own class would rebuild it
RUN_CHARACTERS = "\n\t\u2581"  # U+2581 stands for a space

Json = dict[str, Any]


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
