"""The tokenizer of a GGUF file as a tokenizer.json, with its special tokens, ends of texts and chat templates.

A file names its splitting of texts (`tokenizer.ggml.pre`) without saying what that is; the table below has the regular
expressions of the makers. The rest is what llama.cpp does: which tokens are control tokens, which are found in a text
before all others (user-defined ones), whether a prompt begins with a token.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_file import GgufFile
from omnidraft.models.hf.tokenizer_json import GENERIC_CLASS

STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>", "</s>", "<|eot_id|>", "<|eom_id|>", "<|call|>")
_SPACE = "\u2581"  # stands for a space
_RUN_CHARACTERS = "\n\t" + _SPACE
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE_ROLES = {"unk": 0, "bos": 1, "eos": 2}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a text is split before tokens are merged."""

    patterns: Sequence[str]
    """Regular expressions of the pieces, one after another; none: GPT-2's."""
    splits_digits: bool = False
    composes: bool = False
    """Whether letters and their accents are put together before (NFC)."""
    ignores_merges: bool = False
    """Whether a piece that is a token is not merged."""
    begins: bool = False
    """Whether a prompt begins with a token where the file does not say."""


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(
    digits: str, signs: str = r"[^\s\p{L}\p{N}]+[\r\n]*", letters: str = r"\p{L}+", spaces: str = _SPACES
) -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{signs}|{spaces}"


def _cased_words(digits: str, ending: str) -> str:
    first, other = rf"{_UPPER}*{_LOWER}+{ending}", rf"{_UPPER}+{_LOWER}*{ending}"
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{first}|{start}{other}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    _CHINESE,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_PHRASES = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_SPACES_BY_POWERS = "".join(
    [r"\s*[\r\n]+|", *(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)|\s{1}"]
)
_THREE_DIGITS = (_words(r"\p{N}{1,3}"),)
SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        Splitting(_THREE_DIGITS, ignores_merges=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting(_THREE_DIGITS)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Splitting((_words(r"\p{N}"),), composes=True)),
    "qwen35": Splitting(
        (_words(r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"[\p{L}\p{M}]+"),),
        composes=True,
    ),
    **dict.fromkeys(("hunyuan", "solar-open"), Splitting((_words(r"\p{N}"),))),
    "exaone-moe": Splitting(
        (_words(r"\p{N}", r"[^\s\p{L}\p{N}]+[\r\n/]?", _PHRASES, r"\s*[\r\n]|\s+(?!\S)|\s+"),),
    ),
    "jais-2": Splitting((_words(r"\p{N}{1,3}", spaces=_SPACES_BY_POWERS),)),
    "minimax-m2": Splitting((_cased_words(r"\p{N}{1,3}", f"{_ENDINGS}?"),)),
    "seed-coder": Splitting((_words(r"\p{N}{1}", r"[^\s\p{L}\p{N}\r\n]+"),)),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2"), Splitting((_cased_words(r"\p{N}{1,3}", f"{_ENDINGS}?"),), ignores_merges=True)
    ),
    "tekken": Splitting((_cased_words(r"\p{N}", ""),), ignores_merges=True, begins=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splitting(_DEEPSEEK)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), Splitting((), splits_digits=True)),
    "command-r": Splitting((), splits_digits=True, composes=True),
    **dict.fromkeys(("gpt-2", "phi-2", "granite-docling", "mpt", "olmo", "exaone4", "trillion"), Splitting(())),
}
"""By `tokenizer.ggml.pre`, as llama.cpp groups them."""


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer and the ids that end a text. Raises ModelError where the file's tokenizer is not known."""
    tokens: list[str] = file.needed("tokenizer.ggml.tokens")
    types: list[int] = file.needed("tokenizer.ggml.token_type")
    defaults: Mapping[str, int] = {}
    match file.needed("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, begins = _byte_level(file, tokens, types)
        case "llama":
            tokens = [_SPACE * len(token) if not token.strip(" ") else token for token in tokens]
            tokenizer, begins = _sentencepiece(file, tokens, types)
            defaults = _SENTENCEPIECE_ROLES
        case "gemma4":
            tokenizer, begins = _sentencepiece(file, tokens, types)
        case kind:
            raise ModelError(f"{file.name} has a tokenizer of the kind {kind!r}, which cannot be converted")
    ids = {role: file.get(f"tokenizer.ggml.{key}_token_id", defaults.get(role)) for role, key in _ROLES.items()}
    named = {role: tokens[index] for role, index in ids.items() if index is not None and index < len(tokens)}
    tokenizer.add_tokens(_added(tokens, types))
    first = [named["bos"]] if file.get("tokenizer.ggml.add_bos_token", begins) and "bos" in named else []
    last = [named["eos"]] if file.get("tokenizer.ggml.add_eos_token", False) and "eos" in named else []
    if first or last:
        around = [(text, tokens.index(text)) for text in first + last]
        tokenizer.post_processor = TemplateProcessing([*first, "$A", *last], special_tokens=around)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": text for role, text in named.items()}
    config = {"tokenizer_class": GENERIC_CLASS, "clean_up_tokenization_spaces": False, **roles, **_chat_templates(file)}
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": _stop_ids(file, ids["eos"], tokens, types)})


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether a prompt begins with a token where the file does not say."""
    name = file.needed("tokenizer.ggml.pre")
    if (splitting := SPLITTINGS.get(name)) is None:
        raise ModelError(
            f"{file.name} splits texts by {name!r} (tokenizer.ggml.pre), which is not known here: its texts would get "
            "other tokens than the model learned; give the hub id or folder of the same model"
        )
    tokenizer = Tokenizer(BPE(_vocab(tokens, types), _merges(file), ignore_merges=splitting.ignores_merges))
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if splitting.splits_digits else []
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, *digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begins


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and that a prompt begins with a token where the file does not say."""
    from transformers.tokenization_utils_base import generate_merges

    vocab = _vocab(tokens, types)
    if file.get("tokenizer.ggml.model") == "gemma4":
        merges = _merges(file)
    elif file.architecture.startswith("gemma"):  # its scores do not tell the order of merges, its ids do
        merges = _runs_first(generate_merges(vocab, {token: -index for token, index in vocab.items()}))
    else:
        scores = file.needed("tokenizer.ggml.scores")
        merges = generate_merges(vocab, {token: scores[index] for token, index in vocab.items()})
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", _SENTENCEPIECE_ROLES["unk"])]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) for merge in file.needed("tokenizer.ggml.merges"))
    return [(left, right) for left, right in pairs]


def _vocab(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return the ids without the unused ones: they pad the vocabulary, and must neither be read nor spelled."""
    return {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}


def _added(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Return the tokens that are found in a text before all others."""
    special = (TokenType.UNKNOWN, TokenType.CONTROL)
    return [
        AddedToken(token, special=types[index] in special, normalized=False)
        for index, token in enumerate(tokens)
        if types[index] in (*special, TokenType.USER_DEFINED)
    ]


def _chat_templates(file: GgufFile) -> Json:
    """Return the chat template, or all of them where others have names (for tools, say)."""
    named = {name: file.get(f"tokenizer.chat_template.{name}") for name in file.get("tokenizer.chat_templates", [])}
    if (template := file.get("tokenizer.chat_template")) is None:
        return {}
    several = [{"name": name, "template": text} for name, text in {"default": template, **named}.items()]
    return {"chat_template": several if named else template}


def _stop_ids(file: GgufFile, eos: int | None, tokens: list[str], types: list[int]) -> list[int]:
    """Return the file's own end tokens, then the others of its tokenizer: a completion ends differently than a chat."""
    own = [eos, *(file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    control = {token: index for index, token in enumerate(tokens) if types[index] == TokenType.CONTROL}
    others = [control[token] for token in STOP_TOKENS if token in control]  # Gemma's </s> is HTML
    return list(dict.fromkeys(index for index in [*own, *others] if index is not None))


def _runs_first(merges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return Gemma's merges as its makers order them: the longest run of spaces, tabs or line ends first."""
    runs = [pair for pair in merges if pair[0][0] in _RUN_CHARACTERS and len(set("".join(pair))) == 1]
    known = set(runs)
    others = [pair for pair in merges if pair not in known]
    return sorted(runs, key=lambda pair: (-len(pair[0]), -len(pair[1]))) + others


def _write(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
