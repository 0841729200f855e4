"""Read the content of a `tokenizer.json`: the bytes of its tokens, special tokens and their roles."""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from omnidraft.errors import ModelError
from omnidraft.vocab.tokenizer import Vocabulary

GENERIC_CLASS = "PreTrainedTokenizerFast"  # takes tokenizer.json as it is; a model's own class would rebuild it
UNREACHABLE = "\ufdd0"  # a noncharacter, never part of a text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EXACT_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Those that spell a token behind another one as they do anywhere else."""

_NAMED_ROLES = ("bos", "eos", "pad", "unk")
_TEXTS_OF_ROLE = {
    "end_of_turn": ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eot|>", "<turn|>", "<|return|>", "<|end|>"),
    "start_of_turn": ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|header_start|>", "<|turn>"),
    "end_of_header": ("<|end_header_id|>", "<|header_end|>"),
    "end_of_text": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "user": ("<|user|>",),
    "assistant": ("<|assistant|>",),
    "system": ("<|system|>",),
    "fim_prefix": ("<|fim_prefix|>", "<fim_prefix>"),
    "fim_middle": ("<|fim_middle|>", "<fim_middle>"),
    "fim_suffix": ("<|fim_suffix|>", "<fim_suffix>"),
    "file_separator": ("<|file_sep|>", "<file_sep>"),
    "repository_name": ("<|repo_name|>", "<repo_name>"),
    "think_start": ("<think>",),
    "think_end": ("</think>",),
    "tool_call_start": ("<tool_call>",),
    "tool_call_end": ("</tool_call>",),
}

Json = Mapping[str, Any]


def vocabulary(backend: Tokenizer, plain: Json, named: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary up to the last token, given the special tokens that the tokenizer names by role. Raises
    ModelError when its tokens cannot be spelled in bytes."""
    texts = {role: str(text) for role in _NAMED_ROLES if (text := named.get(f"{role}_token")) is not None}
    named_ids = {role: index for role, text in texts.items() if (index := backend.token_to_id(text)) is not None}
    special = special_tokens(plain)
    special_ids = {*special.values(), *named_ids.values(), plain["model"].get("unk_id")} - {None}
    spelled, fallback_ids = _token_bytes(backend, plain)
    return Vocabulary(
        token_bytes=tuple(b"" if index in special_ids else data for index, data in enumerate(spelled)),
        roles=_roles(special) | named_ids,
        special_ids=frozenset(special_ids),
        fallback_ids=fallback_ids - special_ids,
    )


def _token_bytes(backend: Tokenizer, plain: Json) -> tuple[list[bytes], frozenset[int]]:
    """Return the bytes of each id, none for an id without a token, and the ids that stand for single bytes which text
    has only where no other id spells a character."""
    if (kind := plain["model"]["type"]) not in ("BPE", "Unigram"):
        raise ModelError(f"a {kind} tokenizer cannot be aligned by bytes; use one with BPE or Unigram")
    steps = {step["type"] for step in _steps(plain["decoder"], "decoders")}
    if not steps or steps - _EXACT_DECODERS:
        raise ModelError(f"cannot tell how tokens spell bytes from the decoder {sorted(steps)}")
    size = max(len(plain["model"]["vocab"]), 1 + max(backend.get_vocab().values()))  # a piece may be there twice
    texts = [backend.id_to_token(index) or "" for index in range(size)]
    if "ByteLevel" in steps:
        added = {token["id"] for token in plain["added_tokens"]}
        alphabet = _byte_alphabet()
        is_encoded = [index not in added and alphabet.keys() >= set(text) for index, text in enumerate(texts)]
        spelled = [
            bytes(map(alphabet.__getitem__, text)) if encoded else text.encode()
            for encoded, text in zip(is_encoded, texts, strict=True)
        ]
        return spelled, frozenset()
    found = [_BYTE_TOKEN.fullmatch(text) if "ByteFallback" in steps else None for text in texts]
    spelled = [
        bytes([int(byte[1], 16)]) if byte else backend.decoder.decode(["a", text])[1:].encode()
        for byte, text in zip(found, texts, strict=True)
    ]
    return spelled, frozenset(index for index, byte in enumerate(found) if byte)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of GPT-2's alphabet stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # no start with cached tokenizers needs it

    return {character: byte for byte, character in bytes_to_unicode().items()}


def special_tokens(plain: Json) -> dict[str, int]:
    """Return text -> id of the special tokens."""
    return {token["content"]: token["id"] for token in plain["added_tokens"] if token["special"]}


def for_texts(plain: Json) -> dict[str, Any]:
    """Return the tokenizer for the beginning of a text: no special tokens, and a space before the first word where the
    tokenizer puts one."""
    return {
        **plain,
        "model": _model_for_texts(plain),
        "added_tokens": [token for token in plain["added_tokens"] if not token["special"]],
        "normalizer": _with_unreachable_removed(plain["normalizer"], plain["model"]),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def for_continuations(plain: Json) -> dict[str, Any]:
    """Return the tokenizer for text that continues a text: no special tokens, no space before the first word."""
    return {
        **for_texts(plain),
        "normalizer": _with_unreachable_removed(_without_prefix(plain["normalizer"], "normalizers"), plain["model"]),
        "pre_tokenizer": _without_prefix(plain["pre_tokenizer"], "pretokenizers"),
    }


def begins_after_special_tokens(plain: Json) -> bool:
    """Return whether text after a special token is encoded as the beginning of a text is."""
    return not any(step.get("prepend_scheme") == "first" for step in _steps_before_model(plain))


def has_prefix(plain: Json) -> bool:
    """Return whether the tokenizer puts a space before a text."""
    return any(step["type"] == "Prepend" or _never_prefixed(step) != step for step in _steps_before_model(plain))


def absorbing_ids(plain: Json) -> dict[str, list[int]]:
    """Return the special tokens that absorb the white space before them (`lstrip`), and that after them (`rstrip`)."""
    special = [token for token in plain["added_tokens"] if token["special"]]
    return {side: [token["id"] for token in special if token[side]] for side in ("lstrip", "rstrip")}


def _model_for_texts(plain: Json) -> Json:
    """Return the model with the ids of the added tokens that texts have, and with control tokens out of their reach.

    The library takes the id of an added token from the model, and numbers in order whatever the model does not know.
    A Unigram model, unlike one with merges, then reaches a token for whole words (`single_word`) inside a word too.
    """
    model, control = plain["model"], special_tokens(plain)
    visible = {token["id"]: token["content"] for token in plain["added_tokens"] if not token["special"]}
    if model["type"] == "BPE":
        needed = {model.get("unk_token"), *(text for text in control if len(text) == 1)}  # for what has no other token
        hidden = control.keys() - needed
        known = {text: index for text, index in model["vocab"].items() if text not in hidden}
        merges = [pair for pair in model["merges"] if hidden.isdisjoint([*pair, "".join(pair)])]
        return {**model, "vocab": known | {text: index for index, text in visible.items()}, "merges": merges}
    pieces = dict(enumerate(model["vocab"]))
    lowest = min(score for _text, score in model["vocab"])
    out_of_reach = {index: [f"{UNREACHABLE}{index}", lowest] for index in range(1 + max([*pieces, *visible]))}
    taken_out = {index: out_of_reach[index] for index in pieces.keys() & {*control.values(), model["unk_id"]}}
    added = {index: [text, pieces.get(index, (text, lowest))[1]] for index, text in visible.items()}
    return {**model, "vocab": [*(out_of_reach | pieces | taken_out | added).values()]}


def _with_unreachable_removed(normalizer: Json | None, model: Json) -> Json | None:
    if model["type"] != "Unigram":
        return normalizer
    remove = {"type": "Replace", "pattern": {"String": UNREACHABLE}, "content": ""}
    return {"type": "Sequence", "normalizers": [remove, *_steps(normalizer, "normalizers")]}


def _roles(special: Mapping[str, int]) -> dict[str, int]:
    """Return role -> id: roles that are recognised by a special token's text. Gemma has a "</s>" that is a piece of
    HTML, and "<think>" is text where it is not special."""
    found = {role: [special[text] for text in texts if text in special] for role, texts in _TEXTS_OF_ROLE.items()}
    return {role: ids[0] for role, ids in found.items() if ids}


def _steps_before_model(plain: Json) -> list[Json]:
    return [*_steps(plain["normalizer"], "normalizers"), *_steps(plain["pre_tokenizer"], "pretokenizers")]


def _steps(step: Json | None, parts: str) -> list[Json]:
    """Return the steps of a sequence, or the step itself."""
    if step is None:
        return []
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _without_prefix(step: Json | None, parts: str) -> dict[str, Any] | None:
    """Return the step without the parts that put a space before a text."""
    remaining = [_never_prefixed(each) for each in _steps(step, parts) if each["type"] != "Prepend"]
    if step is None or not remaining:
        return None
    return {"type": "Sequence", parts: remaining}


def _never_prefixed(step: Json) -> Json:
    match step["type"]:
        case "Metaspace":
            return {**step, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**step, "add_prefix_space": False}
        case _:
            return step
