"""Keep a text to a JSON schema or a regular expression, byte by byte, in the target's own vocabulary.

The only file that knows llguidance. It computes which tokens may come next; it never forces a spelling: every token
whose bytes fit is left to the target's draw. The ends of a text are ours, so that any stop ids work.
Shapes: V vocabulary.
"""

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from omnidraft.errors import RequestError
from omnidraft.ports import Grammar
from omnidraft.vocab.tokenizer import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPLAINT = 300
_FREE_SPELLING = '%llguidance {"no_forcing": true}\nstart: '
_DEAD_END = "NoExtensionBias"


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def matcher(self, grammar: Grammar, stop_ids: frozenset[int]) -> "Matcher":
        """A matcher at the beginning of a text.

        Raises:
            RequestError: the grammar cannot be compiled, or nothing could end its texts.
        """
        from llguidance import LLMatcher, LLParserLimits

        if not stop_ids:
            raise RequestError("a grammar needs a target with an end-of-text token, and this one has none")
        limits = LLParserLimits(verbose_errors=False)
        backend = LLMatcher(self._tokenizer, _FREE_SPELLING + _lark(grammar), log_level=0, limits=limits)
        if backend.is_error():
            raise RequestError(f"{grammar.kind}: {_one_line(backend.get_error())}")
        return Matcher(backend, grammar.kind, stop_ids)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        """A second or so for 150,000 tokens."""
        from llguidance import LLTokenizer

        return LLTokenizer(_Tokens(self._vocabulary))  # type: ignore[arg-type]


class Matcher:
    """Implements processors.Processor: -inf for every token that the grammar does not allow next."""

    def __init__(self, backend: "LLMatcher", kind: str, stop_ids: frozenset[int]) -> None:
        self._backend = backend
        self._kind = kind
        self._stop_ids = np.array(sorted(stop_ids))

    def apply(self, logits_V: np.ndarray) -> None:
        """See processors.Processor. Stop ids are allowed where the text matches the whole grammar, and only there.

        Raises:
            RequestError: no token is left, or the grammar became too complex to follow.
        """
        is_allowed_V = self._mask(len(logits_V))
        is_allowed_V[self._stop_ids] = self._backend.is_accepting()
        logits_V[~is_allowed_V] = -np.inf
        if logits_V.max() == -np.inf:
            raise RequestError(f"{self._kind}: no token of the target's vocabulary can follow; change the grammar")

    def take(self, token: int) -> None:
        """See processors.Processor."""
        if token not in self._stop_ids:
            self._backend.consume_token(token)

    def _mask(self, vocab_size: int) -> np.ndarray:
        """Which tokens may come next, bool [V]; the backend's own end of text is one bit more, and left out."""
        bits = np.frombuffer(self._backend.compute_bitmask(), np.uint8)
        complaint = self._backend.get_error()
        if complaint and not complaint.startswith(_DEAD_END):
            raise RequestError(f"{self._kind}: {_one_line(complaint)}")
        return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


class _Tokens:
    """A vocabulary as llguidance reads it. Without an end of text, it adds one of its own behind the last id."""

    is_tokenizer_wrapper = True
    eos_token_id = None
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.token_bytes
        self._longest_match = vocabulary.byte_table.longest_match

    def __call__(self, text: str) -> list[int]:
        return self._longest_match(text.encode())


def _lark(grammar: Grammar) -> str:
    """The grammar as the right side of a rule of llguidance's own language."""
    from llguidance import regex_to_lark

    match grammar.kind:
        case "json_schema":
            return f"%json {json.dumps(_schema(grammar.text))}"
        case "regex":
            return f"/{regex_to_lark(grammar.text)}/"


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as exc:
        raise RequestError(f"json_schema: not JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema must be an object, got {text[:40]!r}")
    return schema


def _one_line(complaint: str) -> str:
    """Without the lines that quote what was compiled."""
    said = re.split(r"\n *1 \|", complaint)[0].removesuffix("<non-verbose/>")
    return " ".join(said.split())[:MAX_COMPLAINT]
