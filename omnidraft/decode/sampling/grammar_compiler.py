"""Compiles a JSON schema, a regular expression or the form of tool calls to masks over one vocabulary.

The only file that knows llguidance. It releases Python's lock while it compiles and while it computes a mask, and holds
it while it reads a vocabulary. Imports nothing heavy: the child process in which grammars are tried runs this very
code. See grammar_trial.py.
"""

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from omnidraft.decode.sampling.input_limits import checked_schema, checked_text
from omnidraft.decode.sampling.number_spelling import NumberSpelling
from omnidraft.errors import RequestError
from omnidraft.tools.argument_grammar import CallableTool, GrammarSpec, with_options
from omnidraft.tools.grammar import compilable, lark
from omnidraft.vocab.tokenizer import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "regex", "lark", "tools"]

MAX_ERROR_CHARS = 300
INITIAL_FUEL, STEP_FUEL = 500_000, 100_000
"""llguidance's limits for a lexer when it compiles, and in each step: about 10 ms for 140,000."""
MAX_LEXER_STATES = 20_000
"""About 2 kB each, per text."""
NUM_TRIED_MASKS = 16
MAX_MASK_S = 0.01
"""Seconds of processor time for one token's mask at most."""
MAX_FREE_TEXT_MASK_S = 0.05
"""The same where free text may end in calls: 5 ms for 150,000 tokens when the text begins, and where a marker may."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_FREE_SPELLING = f"{_NO_FORCING}start: "
_DEAD_END = "NoExtensionBias"
MAX_DIGITS = 20
"""The most digits in a row of a number in JSON that may end before: those of any integer of 64 bits."""


class GrammarCompiler:
    """Compiles for one vocabulary. Making one takes half a second for 150,000 tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(_Tokens(vocabulary))  # type: ignore[arg-type]
        self._spelling = NumberSpelling(vocabulary)

    def compile(self, kind: Kind, text: str) -> "CompiledGrammar":
        """Return the grammar at the beginning of a text.

        Raises:
            RequestError: it is beyond a bound, or cannot be compiled.
        """
        if kind == "tools":
            return self._compile_tools(GrammarSpec.of(checked_schema(text, kind)))
        if kind == "lark":
            return self._compile_whole(kind, f"{_NO_FORCING}{checked_text(text, kind)}")
        return self._compile(kind, _lark(kind, text))

    def try_out(self, kind: Kind, text: str, vocab_size: int) -> None:
        """Compile a grammar and generate a few tokens with it. A text under a grammar of tools may not come to a call,
        so the schemas of their arguments are tried alone, too.

        Raises:
            RequestError: see `compile` and CompiledGrammar.try_out.
        """
        self.compile(kind, text).try_out(vocab_size)
        if kind != "tools":
            return
        for tool in GrammarSpec.of(json.loads(text)).tools:
            if tool.parameters is not None:
                schema = f"%json {json.dumps(self._compilable_schema(tool))}"
                with _naming(tool):
                    self._compile("json_schema", schema).try_out(vocab_size)

    def _compile_tools(self, spec: GrammarSpec) -> "CompiledGrammar":
        """Compile answers that may call tools. Arguments of a tool that is not strict are any object where its schema
        cannot be compiled."""
        content = None if spec.content is None else _lark(*spec.content)
        schemas = [tool.schema() for tool in spec.tools]
        try:
            return self._compile("tools", lark(spec, schemas, content))
        except RequestError:
            for index, tool in enumerate(spec.tools):
                schemas[index] = self._compilable_schema(tool)
            return self._compile("tools", lark(spec, schemas, content))

    def _compilable_schema(self, tool: CallableTool) -> dict[str, Any]:
        """Return the schema of a tool's arguments, or of any object. Raises RequestError, naming a strict tool."""
        try:
            with _naming(tool):
                self._compile("json_schema", f"%json {json.dumps(tool.schema())}")
        except RequestError:
            if tool.is_strict:
                raise
            return replace(tool, parameters=None).schema()
        return tool.schema()

    def _compile(self, kind: Kind, rules: str) -> "CompiledGrammar":
        """Compile llguidance's own language, from the right side of the start rule on. Raises RequestError."""
        return self._compile_whole(kind, _FREE_SPELLING + rules)

    def _compile_whole(self, kind: Kind, grammar: str) -> "CompiledGrammar":
        """Compile llguidance's own language. Raises RequestError."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        backend = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if backend.is_error():
            raise RequestError(f"{kind}: {_one_line(backend.get_error())}")
        return CompiledGrammar(backend, kind, self._spelling)


def check_schema(text: str, name: str) -> None:
    """Raise RequestError, which calls the schema by this name, where no vocabulary could keep to it."""
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(f"{_FREE_SPELLING}%json {json.dumps(checked_schema(text, name))}"):
        raise RequestError(f"{name}: {_one_line(error)}")


@contextmanager
def _naming(tool: CallableTool) -> Iterator[None]:
    """Inside, a refusal of a schema names the tool."""
    try:
        yield
    except RequestError as exc:
        raise RequestError(f"tools: parameters of {tool.name!r}: {exc}") from exc


class CompiledGrammar:
    """Follows one text token by token; a copy at the beginning costs next to nothing. One thread at a time.

    A number of JSON ends after MAX_DIGITS in a row: a weak model that wants a key which is forbidden would go on with
    zeros for ever. A schema cannot say so for numbers with an exponent, nor where it allows any value.
    """

    def __init__(
        self, backend: "LLMatcher", kind: Kind, spelling: NumberSpelling, num_digits: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        self.kind = kind
        self._spelling = spelling
        self._num_digits = list(num_digits)
        """The digits at the end of the text, after each of its tokens."""

    def copy(self) -> "CompiledGrammar":
        """Return another one in the same state."""
        return CompiledGrammar(self._backend.deep_copy(), self.kind, self._spelling, self._num_digits)

    def is_accepting(self) -> bool:
        """Return whether the text so far matches the whole grammar."""
        return self._backend.is_accepting()

    def is_complete(self) -> bool:
        """Return whether the text matches the whole grammar and nothing can follow it."""
        return self._backend.is_accepting() and self._backend.is_stopped()

    def take(self, token: int) -> None:
        """Continue the text with this token."""
        self._backend.consume_token(token)
        self._num_digits.append(self._spelling.digits_after(token, self._last_digits))

    def take_back(self, num_tokens: int) -> None:
        """Remove the last tokens from the text."""
        self._backend.rollback(num_tokens)
        del self._num_digits[len(self._num_digits) - num_tokens :]

    @property
    def _last_digits(self) -> int:
        return self._num_digits[-1] if self._num_digits else 0

    def allows(self, *tokens: int) -> bool:
        """Return whether these tokens may come next, one after the other; a mask costs twenty times as much."""
        return self._backend.validate_tokens(list(tokens)) == len(tokens)

    def forces_bytes(self) -> bool:
        """Return whether only one byte may come next."""
        return bool(self._backend.compute_ff_bytes())

    def only_token(self) -> int | None:
        """Return the token that must come next, None where there are several or none."""
        bits = int.from_bytes(self._backend.compute_bitmask(), "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def forced_tokens(self) -> list[int]:
        """Return the longest tokens that spell the bytes which must come next, without a last one that a longer token
        could take the place of. The bytes are forced; the tokens are one way to spell them."""
        return self._backend.compute_ff_tokens()

    def mask(self, vocab_size: int) -> np.ndarray:
        """Return which tokens may come next, bool [V]; llguidance's own end of text is one bit more, and left out.

        Raises:
            RequestError: the grammar became too complex to follow.
        """
        bits = np.frombuffer(self._backend.compute_bitmask(), np.uint8)
        error = self._backend.get_error()
        if error and not error.startswith(_DEAD_END):
            raise RequestError(f"{self.kind}: {_one_line(error)}")
        is_allowed_V = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
        if self.kind != "regex" and self._last_digits + self._spelling.most_digits > MAX_DIGITS:
            self._end_number(is_allowed_V)
        return is_allowed_V

    def _end_number(self, is_allowed_V: np.ndarray) -> None:
        """Forbid digits behind MAX_DIGITS where a number may end or go on otherwise, else those that bring no end.
        What may come next tells a number from the digits of a string."""
        spelling, most = self._spelling, max(MAX_DIGITS - self._last_digits, 0)
        known_V = is_allowed_V[: len(spelling.num_digits_V)]
        is_digit_V = known_V & (spelling.num_digits_V[: len(known_V)] > most)
        if (known_V & ~spelling.follows_digits_V[: len(known_V)]).any():
            return
        if self.is_accepting() or np.count_nonzero(known_V) > np.count_nonzero(is_digit_V):
            known_V[is_digit_V] = False
        elif last := [token for token in np.flatnonzero(is_digit_V).tolist() if self._may_end_after(token)]:
            known_V[is_digit_V] = False
            known_V[last] = True

    def _may_end_after(self, digit: int) -> bool:
        """Return whether anything but a digit may follow this token, which is one."""
        if len(self._spelling.tokens[digit]) > 1:
            return False
        self._backend.consume_token(digit)
        bits = np.frombuffer(self._backend.compute_bitmask(), np.uint8)
        is_next_V = np.unpackbits(bits, count=len(self._spelling.tokens), bitorder="little").astype(bool)
        may_end = self.is_accepting() or bool((is_next_V & (self._spelling.num_digits_V == 0)).any())
        self._backend.rollback(1)
        return may_end

    def try_out(self, vocab_size: int) -> None:
        """Generate a few tokens, always the same ones.

        Raises:
            RequestError: the grammar becomes too complex, or its masks take too long.
        """
        rng = random.Random(0)
        max_mask_s = MAX_FREE_TEXT_MASK_S if self.kind == "tools" else MAX_MASK_S
        for _ in range(NUM_TRIED_MASKS):
            started_s = time.thread_time()
            allowed = np.flatnonzero(self.mask(vocab_size))
            mask_s = time.thread_time() - started_s
            if mask_s > max_mask_s:
                raise RequestError(
                    f"{self.kind}: {mask_s * 1000:.0f} ms for one token's mask, at most {max_mask_s * 1000:.0f} are "
                    "spent; ask for something simpler"
                )
            if not len(allowed):
                return
            self.take(int(rng.choice(allowed)))


class _Tokens:
    """A vocabulary in llguidance's interface. Without an end of text, llguidance adds one of its own after the last
    id."""

    is_tokenizer_wrapper = True
    eos_token_id = None
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.token_bytes
        self._longest_match = vocabulary.byte_table.longest_match

    def __call__(self, text: str) -> list[int]:
        return self._longest_match(text.encode())


def _lark(kind: str, text: str) -> str:
    """Return the grammar as the right side of a rule of llguidance's own language."""
    from llguidance import regex_to_lark

    if kind == "json_schema":
        return f"%json {json.dumps(with_options(compilable(checked_schema(text))))}"
    checked_text(text, kind)
    return f"/{regex_to_lark(text)}/"


def _one_line(error: str) -> str:
    """Return the message without the lines that quote the grammar."""
    message = re.split(r"\n *1 \|", error)[0].removesuffix("<non-verbose/>")
    return " ".join(message.split())[:MAX_ERROR_CHARS]
