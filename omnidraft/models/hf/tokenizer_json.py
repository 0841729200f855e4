"""Read the content of a `tokenizer.json`: tokens, their byte encoding, special tokens and their roles."""

from collections.abc import Mapping
from typing import Any

from omnidraft.errors import ModelError
from omnidraft.vocab.token_bytes import SPACE_MARKER, Spelling, fallback_ids, token_bytes
from omnidraft.vocab.tokenizer import Vocabulary

GENERIC_CLASS = "PreTrainedTokenizerFast"  # takes tokenizer.json as it is; a model's own class would rebuild it
UNREACHABLE = "\ufdd0"  # a noncharacter, never part of a text

Json = Mapping[str, Any]


def vocabulary(plain: Json, named: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary up to the last token, given the special tokens that the tokenizer names by role. Raises
    ModelError when its tokens cannot be spelled in bytes."""
    tokens, literal = model_tokens(plain), literal_tokens(plain)
    named_ids = _named_ids(tokens | {text: index for index, text in literal.items()}, named)
    special_ids = control_ids(plain) | set(named_ids.values())
    size = 1 + max([*tokens.values(), *literal])
    return Vocabulary(
        token_bytes=token_bytes(tokens, spelling(plain), size=size, literal=literal, special_ids=special_ids),
        roles=roles(plain, named_ids),
        special_ids=special_ids,
        fallback_ids=fallback_ids(tokens, spelling(plain)),
    )


def _named_ids(ids: Mapping[str, int], named: Mapping[str, Any]) -> dict[str, int]:
    """Return role -> id of the special tokens that the tokenizer names."""
    texts = {role: named.get(f"{role}_token") for role in ("bos", "eos", "pad", "unk")}
    return {role: ids[str(text)] for role, text in texts.items() if text is not None and str(text) in ids}


def special_tokens(plain: Json) -> dict[str, int]:
    """Return text -> id of the special tokens."""
    return {token["content"]: token["id"] for token in plain["added_tokens"] if token["special"]}


def model_tokens(plain: Json) -> dict[str, int]:
    """Return token -> id of the model itself. Raises ModelError for a model that drops bytes (WordPiece, words)."""
    model = plain["model"]
    match model["type"]:
        case "BPE":
            return dict(model["vocab"])
        case "Unigram":
            return {token: index for index, (token, _score) in enumerate(model["vocab"])}
        case kind:
            raise ModelError(f"a {kind} tokenizer cannot be aligned by bytes; use one with BPE or Unigram")


def literal_tokens(plain: Json) -> dict[int, str]:
    """Return id -> text of the added tokens, which are not part of the model."""
    return {token["id"]: token["content"] for token in plain["added_tokens"]}


def control_ids(plain: Json) -> frozenset[int]:
    """Return the tokens that no text contains: special added tokens, and the unknown token of the model."""
    special = {token["id"] for token in plain["added_tokens"] if token["special"]}
    unknown = plain["model"].get("unk_id")
    return frozenset(special if unknown is None else special | {unknown})


def spelling(plain: Json) -> Spelling:
    """Return the byte encoding of the model's tokens. Raises ModelError when the decoder does not show it."""
    kinds = {step["type"] for step in _steps(plain["decoder"], "decoders")}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if kinds & {"Metaspace", "ByteFallback"} or _replaces_space_marker(plain["decoder"]):
        return Spelling.SENTENCEPIECE
    raise ModelError(f"cannot tell how tokens spell bytes from the decoder {sorted(kinds)}")


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
    visible = {index: text for index, text in literal_tokens(plain).items() if text not in control}
    if model["type"] == "BPE":
        needed = {model.get("unk_token"), *(text for text in control if len(text) == 1)}  # for what has no other token
        hidden = control.keys() - needed
        known = {text: index for text, index in model["vocab"].items() if text not in hidden}
        merges = [pair for pair in model["merges"] if hidden.isdisjoint([*pair, "".join(pair)])]
        return {**model, "vocab": known | {text: index for index, text in visible.items()}, "merges": merges}
    scores = dict(enumerate(score for _text, score in model["vocab"]))
    texts = {index: text for index, (text, _score) in enumerate(model["vocab"])} | visible
    reachable, lowest = texts.keys() - control_ids(plain), min(scores.values())
    pieces = [
        [texts[index] if index in reachable else f"{UNREACHABLE}{index}", scores.get(index, lowest)]
        for index in range(1 + max([*scores, *literal_tokens(plain)]))
    ]
    return {**model, "vocab": pieces}


def _with_unreachable_removed(normalizer: Json | None, model: Json) -> Json | None:
    if model["type"] != "Unigram":
        return normalizer
    remove = {"type": "Replace", "pattern": {"String": UNREACHABLE}, "content": ""}
    return {"type": "Sequence", "normalizers": [remove, *_steps(normalizer, "normalizers")]}


def roles(plain: Json, named: Mapping[str, int]) -> dict[str, int]:
    """Return role -> id: roles that the tokenizer names (bos, eos, ...), and those recognised by a token's text.

    Only a special token gets a control role by its text: Gemma has a "</s>" that is a piece of HTML.
    """
    added = plain["added_tokens"]
    special = {token["content"]: token["id"] for token in added if token["special"]}
    every = {token["content"]: token["id"] for token in added}
    return _named_role(_texts_of_control_role(), special) | _named_role(_texts_of_visible_role(), every) | dict(named)


def _named_role(texts_of_role: Mapping[str, tuple[str, ...]], ids: Mapping[str, int]) -> dict[str, int]:
    return {
        role: next(ids[text] for text in texts if text in ids)
        for role, texts in texts_of_role.items()
        if not ids.keys().isdisjoint(texts)
    }


def _texts_of_control_role() -> dict[str, tuple[str, ...]]:
    return {
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
    }


def _texts_of_visible_role() -> dict[str, tuple[str, ...]]:
    """Return the texts of markers that some tokenizers treat as text."""
    return {
        "think_start": ("<think>",),
        "think_end": ("</think>",),
        "tool_call_start": ("<tool_call>",),
        "tool_call_end": ("</tool_call>",),
    }


def _steps_before_model(plain: Json) -> list[Json]:
    return [*_steps(plain["normalizer"], "normalizers"), *_steps(plain["pre_tokenizer"], "pretokenizers")]


def _steps(step: Json | None, parts: str) -> list[Json]:
    """Return the steps of a sequence, or the step itself."""
    if step is None:
        return []
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _replaces_space_marker(decoder: Json | None) -> bool:
    replaced = [step["pattern"].get("String") for step in _steps(decoder, "decoders") if step["type"] == "Replace"]
    return SPACE_MARKER in replaced


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
