"""Parses the calls in a model's text while it is written: what is content goes on at once, and so do arguments.

Whatever the text is, parsing never fails: what looks like the beginning of a call and is none is content. How a text is
cut into pieces decides how much comes when, and nothing else. White space around calls is no content.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from omnidraft.tools.formats import ToolFormat

MAX_HEAD_CHARS = 256
"""The longest that a call may be up to its arguments; what is longer is content."""
_KEYS = ("arguments", "parameters")


@dataclass(slots=True)
class CallDelta:
    """The part of a call that a piece of text adds."""

    index: int
    """The number of the call in its answer."""
    name: str | None
    """None unless the call begins here."""
    arguments: str


@dataclass(slots=True)
class Parsed:
    """The content and the parts of calls in a piece of text, in the order in which they are written."""

    pieces: list[str | CallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]


@dataclass(slots=True)
class ParsedToolCall:
    """A call in a whole text."""

    name: str
    arguments: str
    """A JSON object, unless the text was cut off in it."""


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class ToolCallParser:
    """Parses one answer."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        """Parse calls of these tools; a call of any other is content."""
        self._form = form
        self._names = names
        self._state = _State.HEAD if form.is_bare or form.may_be_unmarked else _State.TEXT
        self._buffer = ""
        self._num_lead = 0  # characters of the buffer before a head: a marker or a separator
        self._space = ""  # white space that is content if more content follows
        self._is_in_list = self._is_unmarked = False
        self._expected: tuple[str, ...] = ()
        self._braces = _BraceCounter()
        self._parsed = Parsed()
        self.num_calls = 0

    @property
    def has_open_call(self) -> bool:
        """Whether the last call's arguments have not ended."""
        return self._state is _State.ARGUMENTS

    def feed(self, text: str) -> Parsed:
        """Return what the next piece of the answer says."""
        self._buffer += text
        return self._advance(is_last=False)

    def finish(self) -> Parsed:
        """Return what was held back, at the end of the answer."""
        parsed = self._advance(is_last=True)
        if self._space and not self.num_calls:
            parsed.pieces.append(self._space)
        return parsed

    def _advance(self, *, is_last: bool) -> Parsed:
        step = {
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._read_tail,
        }
        while step[self._state](is_last):
            pass
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    def _read_text(self, is_last: bool) -> bool:
        before, marker, after = self._buffer.partition(self._form.opening)
        num_held = 0 if is_last or marker else _num_begun(before, self._form.opening)
        cut = len(before) - num_held
        self._say(before[:cut])
        self._buffer = before[cut:] + marker + after
        if marker:
            self._state, self._num_lead = _State.HEAD, len(marker)
        return bool(marker)

    def _read_head(self, is_last: bool) -> bool:
        lead, head = self._buffer[: self._num_lead], self._buffer[self._num_lead :]
        match = _HEAD.match(head)
        if match and match.end() <= MAX_HEAD_CHARS and self._is_call(match):
            self._begin_call(match["name"], has_list=bool(match["list"]))
            self._buffer = head[match.end() :]
            return True
        if not match and not is_last and len(head) <= MAX_HEAD_CHARS and _may_become_head(head):
            return False
        self._say(lead)
        self._buffer, self._state = head, _State.TEXT
        return True

    def _is_call(self, head: re.Match[str]) -> bool:
        is_written_so = self._form.may_be_unmarked or not head["fence"]
        return head["name"] in self._names and is_written_so and not (head["list"] and self._form.is_bare)

    def _begin_call(self, name: str, *, has_list: bool) -> None:
        self._parsed.pieces.append(CallDelta(self.num_calls, name, ""))
        self.num_calls += 1
        self._space = ""
        self._is_in_list |= has_list
        if not self._num_lead or self._buffer.startswith(self._form.opening):
            self._is_unmarked = self._form.may_be_unmarked and not self._num_lead
        self._state, self._braces = _State.ARGUMENTS, _BraceCounter()

    def _read_arguments(self, is_last: bool) -> bool:
        end = self._braces.end_of_object(self._buffer)
        arguments, self._buffer = self._buffer[:end], self._buffer[end:]
        self._add_arguments(arguments)
        if not self._braces.is_over:
            return False
        self._state, self._expected = _State.TAIL, ("}",)
        return True

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        if self._parsed.pieces and isinstance(last := self._parsed.pieces[-1], CallDelta):
            last.arguments += text
        else:
            self._parsed.pieces.append(CallDelta(self.num_calls - 1, None, text))

    def _read_tail(self, is_last: bool) -> bool:
        """Read what frames a call behind its arguments."""
        tail = self._buffer.lstrip(_SPACE)
        taken = next((text for text in self._expected if tail.startswith(text)), None)
        if taken is not None:
            self._buffer = tail[len(taken) :]
            self._follow(taken)
            return True
        if not is_last and any(text.startswith(tail) for text in self._expected):
            return False
        self._is_in_list = False
        self._end_call()
        return True

    def _end_call(self) -> None:
        """Read text, or another call where this one had no marker: the next one has none either."""
        self._state, self._num_lead = (_State.HEAD if self._is_unmarked else _State.TEXT), 0

    def _follow(self, taken: str) -> None:
        """Expect what can follow this part of a frame."""
        closing = () if self._form.closing is None else (self._form.closing,)
        if self._is_unmarked:
            closing = (_FENCE, *closing)
        match taken:
            case "}":
                separators = (";",) if self._form.is_bare else ()
                self._expected = (",", "]") if self._is_in_list else (*separators, *closing)
            case "," | ";":
                self._buffer = taken + self._buffer
                self._state, self._num_lead = _State.HEAD, len(taken)
            case "]":
                self._is_in_list, self._expected = False, closing
            case _:
                self._end_call()

    def _say(self, text: str) -> None:
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            self._parsed.pieces.append(content)


def parse(text: str, form: ToolFormat, names: Collection[str]) -> list[ParsedToolCall]:
    """Return the calls in a whole answer."""
    parser = ToolCallParser(form, names)
    deltas = [*parser.feed(text).calls, *parser.finish().calls]
    return [ParsedToolCall(delta.name, delta.arguments) for delta in deltas if delta.name is not None]


class _BraceCounter:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self.is_over = False

    def end_of_object(self, piece: str) -> int:
        """Return where the object ends in its next piece; the piece's length where it does not."""
        for index, character in enumerate(piece):
            if self._is_in_string:
                self._read_in_string(character)
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return index + 1
        return len(piece)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False


def _num_begun(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that begins the marker."""
    return next(length for length in range(min(len(text), len(marker) - 1), -1, -1) if text.endswith(marker[:length]))


def _may_become_head(text: str) -> bool:
    """Return whether a head begins with this text."""
    return any(pattern.match(text) for pattern in _HEAD_BEGINNINGS)


def _beginning_of(parts: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches every text with which a match of all these parts begins."""
    pattern = ""
    for part in reversed(parts):
        pattern = rf"{part}(?:\Z|{pattern})"
    return re.compile(rf"(?:\Z|{pattern})")


_SPACE = " \t\r\n"
_S, _NAME = f"[{_SPACE}]*", "[a-zA-Z0-9_-]{0,64}"
_FENCE, _FENCES = "```", ("", "```", "```json")
_HEAD = re.compile(
    rf'{_S}(?P<fence>```(?:json)?)?{_S}(?P<list>\[)?{_S}\{{{_S}"name"{_S}:{_S}"(?P<name>{_NAME})"{_S},'
    rf'{_S}"(?:{"|".join(_KEYS)})"{_S}:{_S}(?=\{{)'
)
_TO_KEY = [_S, r"\{", _S, *'"name"', _S, ":", _S, '"', _NAME, '"', _S, ",", _S, '"']
_HEAD_BEGINNINGS = [
    _beginning_of([_S, *fence, _S, r"\[?", *_TO_KEY, *key, '"', _S, ":", _S, "{"]) for key in _KEYS for fence in _FENCES
]
