"""Parses the calls in a model's text while it is written: what is content goes on at once, and so do arguments.

Calls are read in the notation of the model's template and in every other of formats.py, as JSON in a fence or alone at
the beginning too, if they name a tool that is offered. Whatever the text is, parsing never fails: what looks like the
beginning of a call and is none is content. How a text is cut into pieces decides how much comes when, and nothing else.
White space around calls is no content.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import regex

from omnidraft.tools.arguments import ArgumentReader, JsonArguments, reader_of
from omnidraft.tools.formats import FORMATS, HERMES, NAME, NUMBER, ToolFormat

MAX_HEAD_CHARS = 320
"""The longest that a call may be up to its arguments; what is longer is content."""


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

    def __init__(self, form: ToolFormat, tools: Collection[str] | Mapping[str, Mapping[str, Any] | None]) -> None:
        """Parse calls of these tools; a call of any other is content.

        Args:
            form: the notation of the model's template, which is tried first.
            tools: their names, with the schemas of their arguments where a notation writes values without types.
        """
        self._forms = (form, *(each for each in FORMATS.values() if each is not form))
        self._schemas = tools if isinstance(tools, Mapping) else dict.fromkeys(tools)
        self._state = _State.HEAD
        self._buffer = ""
        self._num_lead = 0  # characters of the buffer before a head: a marker or a separator
        self._space = ""  # white space that is content if more content follows
        self._form = form  # of the last call
        self._is_in_list = self._is_unmarked = False
        self._expected: tuple[str, ...] = ()
        self._arguments: ArgumentReader = JsonArguments()
        self._parsed = Parsed()
        self.num_calls = 0
        self.unusual: ToolFormat | None = None
        """A notation that calls had and the model's template has not."""

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
        match = _OPENINGS.search(self._buffer, partial=not is_last)
        cut = len(self._buffer) if match is None else match.start()
        self._say(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        if match is None or match.partial:
            return False
        self._state, self._num_lead = _State.HEAD, len(match[0])
        return True

    def _read_head(self, is_last: bool) -> bool:
        may_become_one = False
        for form, pattern in self._patterns():
            match = pattern.match(self._buffer, partial=not is_last)
            if match is not None and match.partial:
                may_become_one |= len(self._buffer) <= MAX_HEAD_CHARS
            elif match is not None and match.end() <= MAX_HEAD_CHARS and match["name"] in self._schemas:
                self._begin_call(form, match)
                return True
        if may_become_one:
            return False
        self._say(self._buffer[: self._num_lead])
        self._buffer, self._state = self._buffer[self._num_lead :], _State.TEXT
        self._is_in_list = self._is_unmarked = False
        return True

    def _patterns(self) -> Sequence[tuple[ToolFormat, "regex.Pattern[str]"]]:
        """Return the heads that may stand here: behind a separator, a marker, or nothing where an answer begins."""
        if self._buffer[:1] in {",", ";"} and self._num_lead == 1:
            return [(self._form, _MORE_IN_LIST[self._form.name])]
        if self._num_lead and not self._buffer.startswith(_FENCE):
            return [(form, _MARKED[form.name]) for form in self._forms]
        return [(self._forms[0] if self._forms[0].is_bare else HERMES, _UNMARKED)]

    def _begin_call(self, form: ToolFormat, head: "regex.Match[str]") -> None:
        groups = head.groupdict()
        self._parsed.pieces.append(CallDelta(self.num_calls, head["name"], ""))
        self.num_calls += 1
        self._space = ""
        if self._num_lead != 1:
            self._is_unmarked = not self._num_lead or head[0].startswith(_FENCE)
        self._is_in_list |= bool(groups.get("list"))
        if form is not self._forms[0] or (self._is_unmarked and not form.is_bare):
            self.unusual = form
        self._form = form
        self._buffer = self._buffer[head.end() - len(groups.get("brace") or "") :]
        self._arguments = reader_of(form.keyed, self._schemas[head["name"]])
        closings = (*form.tail[1:], form.section[1]) if form.is_json else (*form.tail, form.section[1])
        if self._is_unmarked:
            closings = (_FENCE, *closings)
        before = ("}",) * (form.is_json + bool(groups.get("wrapped")))
        self._expected = (*before, *_LIST * self._is_in_list, *(";",) * form.is_bare, *filter(None, closings))
        self._state = _State.ARGUMENTS

    def _read_arguments(self, is_last: bool) -> bool:
        text, self._buffer = self._arguments.read(self._buffer, is_last=is_last)
        if text:
            if self._parsed.pieces and isinstance(last := self._parsed.pieces[-1], CallDelta):
                last.arguments += text
            else:
                self._parsed.pieces.append(CallDelta(self.num_calls - 1, None, text))
        if self._arguments.is_over:
            self._state = _State.TAIL
        return self._arguments.is_over

    def _read_tail(self, is_last: bool) -> bool:
        """Read what frames a call behind its arguments; a model may leave parts of it out."""
        tail = self._buffer.lstrip(_SPACE)
        taken = next((text for text in self._expected if tail.startswith(text)), None)
        if taken is None:
            if not is_last and any(text.startswith(tail) for text in self._expected):
                return False
            self._is_in_list = False
            self._end_call()
            return True
        self._buffer = tail[len(taken) :]
        if taken in {",", ";"}:
            self._buffer = taken + self._buffer
            self._state, self._num_lead = _State.HEAD, 1
            return True
        self._expected = self._expected[self._expected.index(taken) + 1 :]
        self._is_in_list &= taken != "]"
        if not self._expected or (self._is_unmarked and taken == _FENCE):
            self._end_call()
        return True

    def _end_call(self) -> None:
        """Read text, or another call where this one had no marker: the next one has none either."""
        self._state, self._num_lead = (_State.HEAD if self._is_unmarked else _State.TEXT), 0

    def _say(self, text: str) -> None:
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            self._parsed.pieces.append(content)


def parse(
    text: str, form: ToolFormat, tools: Collection[str] | Mapping[str, Mapping[str, Any] | None]
) -> list[ParsedToolCall]:
    """Return the calls in a whole answer."""
    parser = ToolCallParser(form, tools)
    calls: list[ParsedToolCall] = []
    for delta in (*parser.feed(text).calls, *parser.finish().calls):
        if delta.name is not None:
            calls.append(ParsedToolCall(delta.name, ""))
        calls[-1].arguments += delta.arguments
    return calls


_SPACE = " \t\r\n"
_LIST = (",", "]")
_FENCE = "```"
_S = f"[{_SPACE}]*"
_ANY_NAME = r"(?P<name>[a-zA-Z0-9_.:/-]{1,128}?)"
_JSON = (
    rf'(?P<list>\[)?{_S}\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?(?P<wrapped>"function"{_S}:{_S}\{{{_S})?'
    rf'"name"{_S}:{_S}"{_ANY_NAME}"{_S},{_S}"(?:arguments|parameters)"{_S}:{_S}(?P<brace>\{{)'
)
"""A call as a JSON object up to its arguments, which begin with the brace."""
_UNMARKED = regex.compile(rf"{_S}(?:{_FENCE}(?:json)?{_S})?{_JSON}")


def _part(part: str) -> str:
    """Return the pattern of a part of a head."""
    pattern = regex.escape(part.removeprefix("?").strip(), literal_spaces=True)
    pattern = (
        pattern.replace(regex.escape("]" + NAME), rf"\]{_S}{_ANY_NAME}")
        .replace(regex.escape(NAME), _ANY_NAME)
        .replace(regex.escape(NUMBER), "[a-zA-Z0-9_-]+")
    )
    return f"(?:{pattern}{_S})?" if part.startswith("?") else f"{pattern}{_S}"


def _head(form: ToolFormat) -> str:
    """Return the pattern of a call up to its arguments, without the marker of a section."""
    if form.is_json:
        marker = form.head[0] + _S if form.head[0] != "{" else ""
        return marker + _JSON
    follows = (
        "" if form.keyed is None else {"{}": r"(?P<brace>\{)", "()": r"(?P<brace>\()"}.get(form.keyed.brackets, "(?=<)")
    )
    head = "".join(map(_part, form.head)) + (follows or r"(?P<brace>\{)")
    return rf"(?P<list>\[)?{_S}{head}" if form.is_list else head


def _marked(form: ToolFormat) -> "regex.Pattern[str]":
    """Return the pattern of a call behind its opening marker: that of a section, or its own."""
    section, head = form.section[0], _head(form)
    if not section:
        return regex.compile(head)
    needs_section = form.head[0][:1] != "<"
    return regex.compile(f"(?:{regex.escape(section)}{_S}){'' if needs_section else '?'}{head}")


_MARKED = {name: _marked(form) for name, form in FORMATS.items()}
_MORE_IN_LIST = {
    name: regex.compile(f"[,;]{_S}{_head(form) if form.section[0] else _JSON}") for name, form in FORMATS.items()
}


def _openings() -> list[str]:
    """Return the markers with which calls begin inside a text, long ones first."""
    markers = {_FENCE} | {form.opening for form in FORMATS.values()}
    markers |= {form.head[0].partition("{")[0] for form in FORMATS.values() if form.head[0].startswith(("<", "["))}
    return sorted(markers, key=len, reverse=True)


_OPENINGS = regex.compile("|".join(map(regex.escape, _openings())))
