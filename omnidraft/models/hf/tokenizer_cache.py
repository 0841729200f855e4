"""What transformers and we make of a tokenizer's folder, kept for the next start: to import and convert it takes
seconds.

A file belongs to one state of the folder (names, sizes and times), one version of the libraries and one of our own
code; any other, and any that is damaged, is replaced.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers.processors import TemplateProcessing

from omnidraft.errors import ModelError, model_errors
from omnidraft.files import file_states, replace_file
from omnidraft.models.hf import tokenizer_json
from omnidraft.vocab.tokenizer import Vocabulary

_CODE = (__file__, tokenizer_json.__file__)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedTokenizer:
    """A tokenizer as data."""

    continuing_json: str
    """The tokenizer.json for text that continues a text."""
    beginning_json: str | None
    """The tokenizer.json for text that begins one; None where it is the same."""
    begins_after_special_tokens: bool
    """Whether text after a special token is encoded as one that begins."""
    absorbing_ids: dict[str, list[int]]
    """Special tokens that absorb white space, by side: `lstrip` before them, `rstrip` after them."""
    token_texts: list[str]
    """The bytes of each id up to the last token, as Latin-1."""
    roles: dict[str, int]
    special_ids: list[int]
    fallback_ids: list[int]
    special_ids_by_text: dict[str, int]
    special_tokens: dict[str, Any]
    """The special tokens that have a role, by role."""
    chat_template: str | dict[str, str] | None
    """None: this model takes no messages. Of several templates `default` counts."""
    prefix_ids: list[int]
    """The ids that begin every plain prompt."""

    def vocabulary(self, size: int | None = None) -> Vocabulary:
        """Return the vocabulary with so many ids, of which those behind the last token spell nothing. A tokenizer may
        have more than the model: a padding token that was added for training."""
        spelled = [text.encode("latin-1") for text in self.token_texts[:size]]
        spelled += [b""] * ((size or 0) - len(spelled))
        roles = {role: index for role, index in self.roles.items() if index < len(spelled)}
        special, fallback = (
            frozenset(index for index in ids if index < len(spelled)) for ids in (self.special_ids, self.fallback_ids)
        )
        return Vocabulary(tuple(spelled), roles, special, fallback)

    def template(self, *, has_tools: bool = False) -> str:
        """Return the template of messages, or of those with tools: a model may have one for them, `tool_use`."""
        if isinstance(self.chat_template, dict):
            name = "tool_use" if has_tools and "tool_use" in self.chat_template else "default"
            return self.chat_template[name]
        return self.chat_template or ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        continues_last: bool = False,
    ) -> str:
        """Return the text of these messages and of the prompt for an answer or, if it `continues_last`, up to the end
        of what the last message says. Raises jinja2's TemplateError, and what else a template can raise about values
        that it did not expect."""
        rendered = renderer()(  # texts and spans
            conversations=[[dict(message) for message in messages]],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self.template(has_tools=bool(tools)),
            add_generation_prompt=not continues_last,
            continue_final_message=continues_last,
            **{**(options or {}), **self.special_tokens},
        )
        text: str = rendered[0][0]
        return text


def renderer() -> Callable[..., Any]:
    """Return transformers' function that renders chats. Its first call imports transformers: half a second that only
    who chats needs."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def resolve(folder: Path, cache: Path | None = None) -> ResolvedTokenizer:
    """Return the tokenizer of a folder.

    Args:
        cache: the folder that keeps it for the next start; None keeps nothing.

    Raises:
        ModelError: the folder holds no fast tokenizer.
    """
    if cache is None:
        return _load(folder)
    key = _key(folder)
    file = cache / f"{folder.name}-{hashlib.sha256(key['folder'].encode()).hexdigest()[:12]}.json"
    stored = _read(file, key)
    if stored is None:
        stored = _load(folder)
        _write(file, key, stored)
    return stored


def fast_tokenizer(folder: Path) -> Any:
    """Return transformers' fast tokenizer of a folder. Raises ModelError when it holds none."""
    from transformers import AutoTokenizer

    options = {"use_fast": True, "local_files_only": True, "trust_remote_code": False, "mistral_format": False}
    with model_errors(f"no tokenizer in {folder} that transformers can load"):
        if (tekken := folder / "tekken.json").exists() and not (folder / "tokenizer.json").exists():
            return _tekken_tokenizer(tekken)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer in {folder} has no tokenizer.json; convert it to a fast one")
    return tokenizer


def _tekken_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file of Mistral's, with <s> before a text as their own library has it."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    tokenizer: Any = convert_tekken_tokenizer(str(file))
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def _load(folder: Path) -> ResolvedTokenizer:
    tokenizer = fast_tokenizer(folder)
    plain, named = json.loads(tokenizer.backend_tokenizer.to_str()), dict(tokenizer.special_tokens_map)
    vocabulary = tokenizer_json.vocabulary(tokenizer.backend_tokenizer, plain, named)
    beginning = json.dumps(tokenizer_json.for_texts(plain), ensure_ascii=False)
    return ResolvedTokenizer(
        continuing_json=json.dumps(tokenizer_json.for_continuations(plain), ensure_ascii=False),
        beginning_json=beginning if tokenizer_json.has_prefix(plain) else None,
        begins_after_special_tokens=tokenizer_json.begins_after_special_tokens(plain),
        absorbing_ids=tokenizer_json.absorbing_ids(plain),
        token_texts=[each.decode("latin-1") for each in vocabulary.token_bytes],
        roles=dict(vocabulary.roles),
        special_ids=sorted(vocabulary.special_ids),
        fallback_ids=sorted(vocabulary.fallback_ids),
        special_ids_by_text=tokenizer_json.special_tokens(plain),
        special_tokens=named,
        chat_template=tokenizer.chat_template or None,
        prefix_ids=_prefix_ids(tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)),
    )


def _prefix_ids(encoding: Encoding) -> list[int]:
    """Return the ids that were put before a text; some tokenizers put others behind it."""
    return encoding.ids[: [*encoding.special_tokens_mask, 0].index(0)]


def _key(folder: Path) -> dict[str, Any]:
    files = (path for path in sorted(folder.iterdir()) if path.suffix != ".safetensors")
    return {
        "folder": str(folder.resolve()),
        "files": file_states(files),
        "libraries": [metadata.version(name) for name in ("transformers", "tokenizers")],
        "code": [zlib.crc32(Path(each).read_bytes()) for each in _CODE],
    }


def _read(file: Path, key: Mapping[str, Any]) -> ResolvedTokenizer | None:
    try:
        first, _, body = file.read_bytes().partition(b"\n")
        header = json.loads(first)
        is_current = header == {"key": key, "checksum": zlib.crc32(body)}
        return ResolvedTokenizer(**json.loads(body)) if is_current else None
    except (OSError, ValueError, TypeError):  # not there, or damaged
        return None


def _write(file: Path, key: Mapping[str, Any], resolved: ResolvedTokenizer) -> None:
    try:
        body = json.dumps(asdict(resolved)).encode()
        header = json.dumps({"key": key, "checksum": zlib.crc32(body)}).encode()
        replace_file(file, header + b"\n" + body)
    except (OSError, TypeError) as exc:  # TypeError: a special token that is no text
        logger.warning("the next start has to convert the tokenizer of %s again: %s", file.stem, exc)
