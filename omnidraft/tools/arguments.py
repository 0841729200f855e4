"""Reads the arguments of a call while they are written, and gives them on as a JSON object."""

import ast
import json
from collections.abc import Mapping
from typing import Any, Protocol

import regex

from omnidraft.tools.formats import Keyed

_SPACE = " \t\r\n"


class ArgumentReader(Protocol):
    """Reads one call's arguments."""

    is_over: bool
    """Whether their end was read."""

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Return what the text adds to the JSON object, and the rest of the text, which is given again with more."""


def reader_of(keyed: Keyed | None, schema: Mapping[str, Any] | None) -> ArgumentReader:
    """Return a reader of arguments in this notation, which match this schema."""
    if keyed is None:
        return JsonArguments()
    return BracketedArguments(keyed, schema) if keyed.brackets else TaggedArguments(keyed, schema)


class JsonArguments:
    """A JSON object as it is."""

    def __init__(self) -> None:
        self._brackets = _Brackets('"')
        self.is_over = False

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """See ArgumentReader."""
        end = self._brackets.end_in(text, is_last=is_last)
        self.is_over = self._brackets.is_closed
        return text[:end], text[end:]


class TaggedArguments:
    """Values between tags; strings stand as they are."""

    def __init__(self, keyed: Keyed, schema: Mapping[str, Any] | None) -> None:
        before, after = (
            rf"[{_SPACE}]*".join(map(regex.escape, parts)) for parts in (keyed.before_key, keyed.after_key)
        )
        self._key = regex.compile(rf"[{_SPACE}]*{before}(?P<key>[^<>\"]*?){after}")
        self._closing = keyed.after_value
        self._schema = schema
        self._num_values = 0
        self.is_over = False

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """See ArgumentReader."""
        said = ""
        while match := self._key.match(text, partial=not is_last):
            end = -1 if match.partial else text.find(self._closing, match.end())
            if end < 0:
                return said, text
            value = _typed(_without_line_ends(text[match.end() : end]), match["key"], self._schema)
            said += f"{', ' if self._num_values else '{'}{_json(match['key'])}: {_json(value)}"
            self._num_values += 1
            text = text[end + len(self._closing) :]
        self.is_over = True
        return said + ("}" if self._num_values else "{}"), text


class BracketedArguments:
    """Values in brackets: Python's keyword arguments, or Gemma's object without quotes around its names."""

    def __init__(self, keyed: Keyed, schema: Mapping[str, Any] | None) -> None:
        self._keyed, self._schema = keyed, schema
        self._brackets = _Brackets('"', keyed.quote or "'")
        self._text = ""
        self.is_over = False

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """See ArgumentReader. Nothing is given on before the end is read."""
        end = self._brackets.end_in(text, is_last=is_last)
        self._text += text[:end]
        self.is_over = self._brackets.is_closed
        if not self.is_over:
            return (self._text if is_last else ""), text[end:]
        values = _python_values(self._text) if not self._keyed.quote else _gemma_values(self._text, self._keyed.quote)
        return (self._text if values is None else _json(values)), text[end:]


def _python_values(text: str) -> dict[str, Any] | None:
    """Return the keyword arguments in brackets; None where they are none. JSON's names are read, too."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        return {each.arg or "": ast.literal_eval(_JsonNames().visit(each.value)) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return None


class _JsonNames(ast.NodeTransformer):
    """Makes JSON's names Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _gemma_values(text: str, quote: str) -> Any:
    """Return the object in which names have no quotes and strings have these; None where it is none."""
    parts = text.split(quote)
    for index in range(0, len(parts), 2):
        parts[index] = _BARE_KEY.sub(r'\1"\2":', parts[index])
    for index in range(1, len(parts), 2):
        parts[index] = _json(parts[index])
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError):
        return None


_BARE_KEY = regex.compile(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:')


def _typed(text: str, key: str, schema: Mapping[str, Any] | None) -> Any:
    """Return a value that is written without its type: JSON where the schema asks for no string, else a string."""
    properties = (schema or {}).get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    types = types_of(declared)
    if not types or ("string" in types and not ("null" in types and text == "null")):
        return text
    try:
        return json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def types_of(schema: Any) -> set[str]:
    """Return the types that a schema names, without following references."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            types |= {name for each in schema[several] for name in types_of(each)}
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    return types | {"string" for each in values if isinstance(each, str)}


def _without_line_ends(text: str) -> str:
    """Return a value without the line ends that tags may stand on lines of their own for."""
    return text.removeprefix("\n").removesuffix("\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Brackets:
    """Finds the end of a text in brackets that comes in pieces."""

    def __init__(self, *quotes: str) -> None:
        """Count no brackets between two of the same quotes; a backslash escapes within quotes of one letter."""
        inside = {quote: regex.escape(quote) + (r"|\\(?s:.)" if len(quote) == 1 else "") for quote in quotes}
        outside = "|".join(map(regex.escape, (*quotes, *"{[()]}")))
        self._sought = {quote: regex.compile(pattern) for quote, pattern in {**inside, "": outside}.items()}
        self._quote = ""
        self._depth = 0
        self.is_closed = False

    def end_in(self, piece: str, *, is_last: bool) -> int:
        """Return where the text ends in its next piece, or how much of the piece is read: all, but for the beginning of
        a quote or of what is escaped."""
        place = 0
        while not self.is_closed and (match := self._sought[self._quote].search(piece, place, partial=not is_last)):
            if match.partial:
                return match.start()
            found, place = match[0], match.end()
            if found in self._sought:
                self._quote = "" if self._quote else found
            elif not self._quote:
                self._depth += 1 if found in "{[(" else -1
                self.is_closed = self._depth == 0
        return place if self.is_closed else len(piece)
