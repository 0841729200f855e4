"""The tokenizer of a saved transformers folder, behind the interface of vocab/tokenizer.py.

It encodes in two ways: `encode` takes text that continues a text, so it adds nothing and recognises no special token;
`chat_prompt_ids` takes messages, where only the template's own special tokens count, whatever a user wrote.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from omnidraft.errors import ModelError, RequestError
from omnidraft.models.hf.tokenizer_cache import fast_tokenizer, renderer, resolve
from omnidraft.models.hf.tokenizer_json import UNREACHABLE
from omnidraft.params import ROWS, UNSAID, SamplingNumbers
from omnidraft.tools.formats import ToolFormat, detect, knows_tools
from omnidraft.tools.messages import Message, has_calls, map_strings, plain_messages, template_messages
from omnidraft.tools.reasoning import ReasoningFormat, detect_reasoning
from omnidraft.vocab.thoughts import ThoughtMarkers

Tool = Mapping[str, Any]
_TEMPLATE_BUGS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What a template raises about values that its author did not think of."""
ENDS = ("eos", "end_of_turn", "end_of_text")


class HfTokenizer:
    """A tokenizer that is immutable and may be shared between threads."""

    def __init__(self, folder: Path | str, vocab_size: int | None = None, *, cache: Path | None = None) -> None:
        """
        Args:
            vocab_size: rows of the model's head; the ids beyond the tokenizer's table spell nothing.
            cache: see tokenizer_cache.resolve.

        Raises:
            ModelError: the folder holds no fast tokenizer, or one whose tokens cannot be spelled in bytes.
        """
        self._folder = Path(folder)
        self._resolved = resolve(self._folder, cache)
        self.special_ids: Mapping[str, int] = self._resolved.special_ids_by_text
        """The special tokens, which spell nothing, by their text."""
        self.vocabulary = self._resolved.vocabulary(vocab_size)
        continuing, beginning = self._resolved.continuing_json, self._resolved.beginning_json
        self._backend = Backend.from_str(continuing)
        self._beginning_backend = Backend.from_str(beginning) if beginning else self._backend
        self._identity = hashlib.sha256(
            f"{len(self.vocabulary)}\n{continuing}\n{self._resolved.chat_template}".encode()
        )

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides how texts and messages are encoded."""
        return self._identity.hexdigest()

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text: end of text, end of turn, and those that the folder's configuration names."""
        ends = {self.vocabulary.roles[role] for role in ENDS if role in self.vocabulary.roles}
        return frozenset(each for each in ends | _configured_ends(self._folder) if each < len(self.vocabulary))

    @cached_property
    def sampling_defaults(self) -> SamplingNumbers:
        """The sampling settings that the model's own generation_config.json names, for requests that say none, as in
        vLLM; those of params.UNSAID where it names none or wrong ones."""
        named = _read_json(self._folder / "generation_config.json") or {}
        allowed = {name: named[name] for name, row in ROWS.items() if name in named and row.bounds.allow(named[name])}
        return replace(UNSAID, **allowed)

    def encode(self, text: str) -> list[int]:
        """Encode a text that continues another; nothing is added and no special token is recognised."""
        return _ids(self._backend, text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, faster than one by one."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    @property
    def has_chat_template(self) -> bool:
        """Whether this model takes messages; a base model only continues plain text."""
        return bool(self._resolved.chat_template)

    def prepare_chats(self) -> None:
        """Import now what the first chat needs, so that it does not wait for it."""
        if self.has_chat_template:
            renderer()

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format in which the chat template writes calls of tools."""
        return detect(self._resolved.template(has_tools=True))

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format in which the chat template has thoughts; None where it shows none."""
        return detect_reasoning(self._resolved.template(has_tools=False))

    @cached_property
    def thought_markers(self) -> ThoughtMarkers | None:
        """What frames thoughts, in this vocabulary."""
        if (form := self.reasoning_format) is None:
            return None
        texts = {self.special_ids[text]: text.encode() for text in form.markers if text in self.special_ids}
        closing, may_return = form.closing + form.turn, form.is_anywhere
        return ThoughtMarkers(self.vocabulary, texts, form.opening, closing, header=form.header, may_return=may_return)

    def chat_prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        tool_format: ToolFormat | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> list[int]:
        """Encode the messages with the tokenizer's own chat template and its generation prompt.

        Args:
            tools: definitions in OpenAI's shape.
            tool_format: how calls are written for a template that knows no tools; None: as this one's are.
            options: further variables of the template.
            continues_last: end in the last message, which the answer goes on with, and not behind it.

        Raises:
            RequestError: there is no chat template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise RequestError(f"the tokenizer in {self._folder} has no chat template; send a plain prompt instead")
        try:  # with whatever looks like a special token in the messages escaped, so that the others are the template's
            form = tool_format or self.tool_format
            escaped = map_strings(template_messages(messages, form), self._escape_special_tokens)
            escaped_tools = map_strings(tools, self._escape_special_tokens)
            if (tools or has_calls(messages)) and not self._template_knows_tools:
                escaped, escaped_tools = plain_messages(escaped, escaped_tools, form), ()
            text = self._resolved.render(escaped, escaped_tools, options or {}, continues_last=continues_last)
        except (TemplateError, *_TEMPLATE_BUGS) as exc:
            first_line = str(exc).partition("\n")[0].replace(UNREACHABLE, "")  # others hold the whole chat
            raise RequestError(f"the chat template refuses these messages: {first_line}") from exc
        return self.templated_ids(text)

    @cached_property
    def _template_knows_tools(self) -> bool:
        return knows_tools(self._resolved.template(has_tools=True))

    def prompt_ids(self, text: str) -> list[int]:
        """Encode a plain prompt, with the bos token where the tokenizer adds one; special tokens stay text."""
        return self._resolved.prefix_ids + self._encode_beginning(text)

    def _encode_beginning(self, text: str) -> list[int]:
        """Encode a text that continues no other: some tokenizers put a space before it."""
        return _ids(self._beginning_backend, text)

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _escape_special_tokens(self, content: str) -> str:
        """Insert a character that no text contains into whatever looks like a special token."""
        if not self.special_ids:
            return content
        return self._specials.sub(
            lambda match: match[0][0] + UNREACHABLE + match[0][1:], content.replace(UNREACHABLE, "")
        )

    def templated_ids(self, text: str) -> list[int]:
        """Encode a prompt that was templated: special tokens that are written in it as their ids, and the text between
        them as text, without the white space that they absorb."""
        parts = self._specials.split(text) if self.special_ids else [text]
        found = [self.special_ids.get(part) for part in parts]  # every second one is special
        ids: list[int] = []
        for number, part in enumerate(parts):
            if (special := found[number]) is not None:
                ids.append(special)
            elif between := self._between(part, found[max(number - 1, 0)], found[min(number + 1, len(parts) - 1)]):
                begins = not ids or self._resolved.begins_after_special_tokens
                ids += self._encode_beginning(between) if begins else self.encode(between)
        return ids

    def _between(self, part: str, before: int | None, after: int | None) -> str:
        """Return the text between two special tokens, None where there is none."""
        text = part.replace(UNREACHABLE, "")
        text = text.lstrip() if before in self._resolved.absorbing_ids["rstrip"] else text
        return text.rstrip() if after in self._resolved.absorbing_ids["lstrip"] else text


def _configured_ends(folder: Path) -> set[int]:
    """Return the ids that generation_config.json names, or config.json in a folder without it."""
    generation = _read_json(folder / "generation_config.json")
    config = (_read_json(folder / "config.json") or {}) if generation is None else generation
    for part in (config, config.get("text_config", {})):
        if (eos := part.get("eos_token_id")) is not None:
            return set(eos) if isinstance(eos, list) else {eos}
    return set()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return what a file holds, None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def load_tokenizer(folder: Path, cache: Path | None = None) -> HfTokenizer:
    """Load the tokenizer of a model folder, with as many ids as the model's head.

    Args:
        cache: see tokenizer_cache.resolve.

    Raises:
        ModelError: the folder holds none that can be used.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{folder} is not a model folder: {exc}") from exc
    known = config.get("text_config", config).get("vocab_size")
    if known is None:  # it is the default of the model's type
        from omnidraft.models.hf.pretrained import load_config

        known = load_config(folder).vocab_size
    return HfTokenizer(folder, known, cache=cache)


def loaded_tokenizer(tokenizer: Any, vocab_size: int) -> HfTokenizer:
    """Return the interface of a tokenizer that transformers has loaded, with as many ids as the model's head.

    Raises:
        ModelError: it is none that can be used.
    """
    with tempfile.TemporaryDirectory(prefix="omnidraft-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return HfTokenizer(folder, vocab_size)


def _ids(backend: Backend, text: str) -> list[int]:
    """Encode a text as a batch, during which other threads of Python run, unlike with `Backend.encode`."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def write_byte_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer beside that of another folder. Raises ModelError where there is none to begin with."""
    from transformers import PreTrainedTokenizerFast  # slow to import, and of no use to a start with cached tokenizers

    old = fast_tokenizer(source)
    special = [token.content for _, token in sorted(old.added_tokens_decoder.items()) if token.special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: at for at, token in enumerate([*special, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=old.chat_template, **old.special_tokens_map
    ).save_pretrained(folder)
