"""From a request's texts to prompt ids, and from its tools to a grammar, for a pair of models."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.sampling.grammar import require_end
from omnidraft.errors import ContextExceeded, RequestError
from omnidraft.params import SamplingNumbers, require_ids
from omnidraft.ports import Grammar
from omnidraft.tools.formats import HERMES, ToolFormat
from omnidraft.tools.grammar import grammar_text
from omnidraft.tools.messages import strings_of
from omnidraft.tools.reasoning import ReasoningFormat
from omnidraft.vocab.thoughts import Phase, ThoughtMarkers, Thoughts
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_PREFIX: Final = "fim_prefix"
_SUFFIX: Final = "fim_suffix"
_MIDDLE: Final = "fim_middle"
_TAIL_IDS: Final = 16
"""Ids at the end of a prompt that say whether thoughts have begun in it."""
_ENDS: Final = (_PREFIX, _SUFFIX, _MIDDLE, "file_separator", "repository_name")
"""Roles of the special tokens that begin something else, so that a middle ends before them."""


def can_infill(vocabulary: Vocabulary) -> bool:
    """Return whether the model has the special tokens that mark a gap."""
    return vocabulary.roles.keys() >= {_PREFIX, _SUFFIX, _MIDDLE}


def infill_ids(prefix: str, suffix: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text with a gap, for a tokenizer that `can_infill`; what the tokenizer begins texts with is
    not among them."""
    roles = tokenizer.vocabulary.roles
    before, behind = tokenizer.encode(prefix), tokenizer.encode(suffix)
    return [roles[_PREFIX], *before, roles[_SUFFIX], *behind, roles[_MIDDLE]]


def infill_stop_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Return the ids that end a middle, besides those that end any text."""
    return frozenset(vocabulary.roles[role] for role in _ENDS if role in vocabulary.roles)


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also knows its model's chat template and stop ids."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def reasoning_format(self) -> ReasoningFormat | None: ...

    @property
    def thought_markers(self) -> ThoughtMarkers | None: ...

    @property
    def sampling_defaults(self) -> SamplingNumbers: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def tool_format(self) -> ToolFormat: ...

    @property
    def special_ids(self) -> Mapping[str, int]: ...

    def chat_prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        tool_format: ToolFormat | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> list[int]: ...

    def prompt_ids(self, text: str) -> list[int]: ...

    def templated_ids(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """The target and the drafter that an engine serves, by name, with their tokenizers."""

    target: str
    drafter: str
    worker: str
    alignment: str
    target_tokenizer: PromptTokenizer
    drafter_tokenizer: PromptTokenizer | None
    """None without a drafter."""
    tool_format: ToolFormat = HERMES
    """How the target writes calls of tools."""

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The notation of the target's thoughts; None where its chat template shows none."""
        return self.target_tokenizer.reasoning_format

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens as they are written."""
        texts, vocabulary = self.special_texts, self.target_tokenizer.vocabulary
        return b"".join(texts.get(each) or vocabulary.spell((each,)) for each in ids).decode("utf-8", "replace")

    @property
    def special_texts(self) -> dict[int, bytes]:
        """The texts of the target's special tokens, which spell nothing."""
        return {token: text.encode() for text, token in self.target_tokenizer.special_ids.items()}

    @property
    def marker_ids(self) -> dict[str, int]:
        """The target's special tokens that frame calls, by their text; markers that it spells are not among them."""
        return self._known_ids(self.tool_format.markers)

    @property
    def thought_ids(self) -> dict[str, int]:
        """The same of those that frame thoughts."""
        return self._known_ids(self.reasoning_format.markers if self.reasoning_format else ())

    def shown_ids(self, *, is_chat: bool, has_tools: bool) -> dict[int, bytes]:
        """Return the ids that spell nothing and whose text the answer shows: markers of thoughts and of calls."""
        shown = (self.thought_ids if is_chat else {}) | (self.marker_ids if has_tools else {})
        return {token: text.encode() for text, token in shown.items()}

    def _known_ids(self, markers: Sequence[str]) -> dict[str, int]:
        known = self.target_tokenizer.special_ids
        return {text: known[text] for text in markers if text in known}


def with_tool_grammar(request: GenerationRequest, pair: Pair) -> GenerationRequest:
    """Return the request with the grammar of answers that may call its tools; a grammar of its own is then that of
    answers without calls. Raises RequestError."""
    use, own = request.tools, request.sampling.grammar
    if use is None or (own is not None and (own.kind == "tools" or use.choice == "none")):
        return request
    content = None if own is None else (own.kind, own.text)
    grammar = Grammar("tools", grammar_text(use, pair.tool_format, pair.marker_ids, content))
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


def read_prompt(request: GenerationRequest, pair: Pair, context_limit: int) -> list[int]:
    """Return the target's ids of the prompt, which is not tokenized where it cannot fit into the context. Raises as
    `prompt_ids` does."""
    tokenizer = pair.target_tokenizer
    least = math.ceil(prompt_bytes(request) / int(tokenizer.vocabulary.num_bytes.max()))
    if least > context_limit and request.max_prompt_tokens is None:
        raise ContextExceeded(least, 1, context_limit, is_read=False)
    if request.prompt_ids is None:
        ids = prompt_ids(request, tokenizer, pair.tool_format)
    else:
        ids = list(request.prompt_ids)
        require_ids("prompt", ids, len(tokenizer.vocabulary))
    return ids if request.max_prompt_tokens is None else ids[-min(request.max_prompt_tokens, context_limit - 1) :]


def prompt_ids(request: GenerationRequest, tokenizer: PromptTokenizer, tool_format: ToolFormat) -> list[int]:
    """Return the ids of the prompt.

    Args:
        tool_format: how the target writes calls.

    Raises:
        RequestError: there is none, the chat template refuses it, or the model cannot fill in a middle.
    """
    if sum(each is not None for each in (request.prompt, request.prompt_ids, request.messages)) != 1:
        raise RequestError("give either a prompt or messages")
    if request.prompt_ids is not None:
        raise RequestError("the prompt is in ids of another vocabulary")
    if request.messages is not None:
        if request.suffix is not None:
            raise RequestError("suffix: it is for a plain prompt, not for messages")
        if not request.messages:
            raise RequestError("the prompt is empty; give at least one message")
        definitions = () if request.tools is None else request.tools.definitions()
        return tokenizer.chat_prompt_ids(
            request.messages,
            definitions,
            tool_format,
            options=request.template_options,
            continues_last=request.continues_last,
        )
    if request.tools is not None:
        raise RequestError("tools: they are for messages, not for a plain prompt")
    if request.suffix is not None:
        if not can_infill(tokenizer.vocabulary):
            raise RequestError("suffix: the model has no special tokens for filling in a middle; leave it out")
        return tokenizer.prompt_ids("") + infill_ids(request.prompt or "", request.suffix, tokenizer)
    if not request.prompt:
        raise RequestError("the prompt is empty; give at least one character")
    if request.reads_special:
        return tokenizer.templated_ids(request.prompt)
    return tokenizer.prompt_ids(request.prompt) if request.adds_special else tokenizer.encode(request.prompt)


def drafter_prompt_ids(request: GenerationRequest, pair: Pair) -> list[int]:
    """Return the drafter's ids of the prompt, none without a drafter: of what is before the gap, where it cannot fill
    in a middle. Raises as `prompt_ids` does."""
    tokenizer, target_vocabulary = pair.drafter_tokenizer, pair.target_tokenizer.vocabulary
    if tokenizer is None:
        return []
    if request.suffix is not None and not can_infill(tokenizer.vocabulary):
        return tokenizer.prompt_ids(request.prompt or "")
    if request.prompt_ids is not None:
        spelled = target_vocabulary.spell(request.prompt_ids).decode("utf-8", "replace")
        return tokenizer.prompt_ids(spelled)
    return prompt_ids(request, tokenizer, pair.tool_format)


def thoughts_of(request: GenerationRequest, pair: Pair, ids: Sequence[int]) -> Thoughts | None:
    """Return what the end of a rendered prompt says about the answer's thoughts; None where the answer has none."""
    form, markers = pair.reasoning_format, pair.target_tokenizer.thought_markers
    if form is None or markers is None or request.messages is None:
        return None
    ending = pair.spelled(ids[-_TAIL_IDS:]).rstrip()
    phase = Phase.LEAD
    if ending.endswith(form.opening):
        phase = Phase.THOUGHTS
    elif ending.endswith(form.closing) or request.continues_last:
        phase = Phase.CONTENT
    return Thoughts(markers, phase, request.sampling.grammar is not None, request.max_thought_tokens)


def stop_ids(request: GenerationRequest, tokenizer: PromptTokenizer) -> frozenset[int]:
    """Return the ids that end the answer. Raises RequestError."""
    require_ids("stop_token_ids", request.stop_ids, len(tokenizer.vocabulary))
    ends = frozenset(request.stop_ids)
    if not request.ignores_eos:
        ends |= tokenizer.stop_ids
        if request.suffix is not None:
            ends |= infill_stop_ids(tokenizer.vocabulary)
    if request.sampling.grammar is not None:
        require_end(ends)
    return ends


def bad_ids(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of the request's bad words, at the beginning of a text and behind a space, as in vLLM."""
    texts = [text for word in request.bad_words for text in (word, f" {word.lstrip()}") if word]
    return tuple(dict.fromkeys(tuple(tokenizer.encode(text)) for text in texts))


def prompt_bytes(request: GenerationRequest) -> int:
    """Return the bytes of what the client wrote into the prompt, tools not counted."""
    contents = [message.get("content") for message in request.messages or ()]
    texts = (request.prompt or "", request.suffix or "", *strings_of(contents))
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def client_texts(request: GenerationRequest) -> Mapping[str, Iterable[str]]:
    """Return every string that the client wrote, by its field in the request."""
    texts: dict[str, Iterable[str]] = {"prompt": [request.prompt or ""], "stop": request.stop_strings}
    texts |= {"suffix": [request.suffix or ""], "user": [request.tenant], "bad_words": request.bad_words}
    texts |= {"prediction": [request.prediction]}
    texts |= {"messages": strings_of(list(request.messages or ()))}
    if request.tools is not None:
        texts["tools"] = strings_of(request.tools.definitions())
    grammar = request.sampling.grammar
    if grammar is not None and grammar.kind != "tools":  # which with_tool_grammar wrote
        texts[grammar.kind] = [grammar.text]
    return texts
