"""The rules of a call's arguments in a grammar, and the parts that all rules are made of."""

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnidraft.tools.arguments import types_of
from omnidraft.tools.formats import NUMBER, Keyed, ToolFormat
from omnidraft.tools.tool_use import Choice

SPACE = r"[ \t\r\n]"
ANY_TEXT = "(?s:.*)"
_LENGTHS = ("minLength", "maxLength")
JSON_OPTIONS = {"whitespace_pattern": f"{SPACE}{{0,32}}"}
"""White space that a model may put between two tokens of JSON; without a bound a weak one fills its answer with it."""
_LENIENT_OPTIONS = {**JSON_OPTIONS, "lenient": True, "coerce_one_of": True}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as the grammar knows it."""

    name: str
    parameters: Mapping[str, Any] | None
    """The schema that arguments match; None: they are any object."""
    is_strict: bool

    def schema(self) -> dict[str, Any]:
        """Return the schema of the arguments, an object's, in the compiler's dialect."""
        options = JSON_OPTIONS if self.is_strict else _LENIENT_OPTIONS
        return with_options({**(self.parameters or {}), "type": "object"}, options)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """All that decides a grammar of answers with calls."""

    format: str
    choice: Choice
    max_calls: int
    special_ids: Mapping[str, int]
    """The ids of those markers that spell nothing."""
    tools: tuple[CallableTool, ...]
    content: tuple[str, str] | None
    """The kind and text of a grammar that answers without calls match; None: any text."""
    header: str = ""
    """What stands before an answer without calls; free text cannot come before a call then."""

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "GrammarSpec":
        """Return the specification that `grammar_text` wrote as JSON."""
        tools = tuple(CallableTool(**tool) for tool in fields["tools"])
        content = fields["content"] and tuple(fields["content"])
        return GrammarSpec(**{**fields, "tools": tools, "content": content})


def with_options(schema: Mapping[str, Any], options: Mapping[str, Any] = JSON_OPTIONS) -> dict[str, Any]:
    """Return the schema with the compiler's options, of which its own go first."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}


def argument_rules(spec: GrammarSpec, form: ToolFormat, index: int, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of a tool's arguments. Where they are no JSON object, its properties come in their order."""
    if form.keyed is None:
        yield f"arguments_{index}: %json {json.dumps(schema)}"
        return
    keyed, opening, closing = form.keyed, form.keyed.brackets[:1], form.keyed.brackets[1:]
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    names = [f"value_{index}_{number}" for number in range(len(properties))]
    for number, (name, (key, value)) in enumerate(zip(names, properties.items(), strict=True)):
        text = f"text_{index}_{number}"
        if keyed.text_end and isinstance(value, Mapping) and not value.keys().isdisjoint(_LENGTHS):
            yield from text_rules(spec, keyed, text, value)
        else:
            text = "text"
        yield f"{name}: {_key(keyed, json.dumps(key), spec)} {_value_of(keyed, text, value, schema, spec)}"
    separator = '"," space' if keyed.brackets else "space"
    if properties:
        are_required = [key in required for key in properties]
        values = yield from _in_order(f"rest_{index}", names, are_required, separator)
    else:
        yield f"any_{index}: {_key(keyed, 'KEY', spec)} {_value_of(keyed, 'text', {}, {}, spec)}"
        values = f"(any_{index} ({separator} any_{index})*)?"
    framed = f"{json.dumps(opening)} {values} {json.dumps(closing)}" if keyed.brackets else values
    yield f"arguments_{index}: {framed}"


def _in_order(
    rest: str, names: Sequence[str], are_required: Sequence[bool], separator: str
) -> Generator[str, None, str]:
    """Yield the rules of what may follow each value, and return the whole: all required ones, in order."""
    for number in range(len(names) - 1, -1, -1):
        following = names[number + 1 :]
        if following:
            more = f"{separator} {following[0]} {rest}_{number + 1}"
            yield f"{rest}_{number}: {more}" + ("" if are_required[number + 1] else f" | {rest}_{number + 1}")
        else:
            yield f'{rest}_{number}: ""'
    firsts = list(range(len(names)))
    if any(are_required):
        firsts = firsts[: list(are_required).index(True) + 1]
    begun = [f"{names[number]} {rest}_{number}" for number in firsts]
    return f"({' | '.join(begun)})" + "?" * (not any(are_required))


def _key(keyed: Keyed, key: str, spec: GrammarSpec) -> str:
    """Return the right side of a value's name and of what frames it."""
    before = [marker(part, spec) for part in keyed.before_key]
    return " ".join((*before, key, " space ".join(marker(part, spec) for part in keyed.after_key)))


def _value_of(keyed: Keyed, text: str, schema: Any, whole: Mapping[str, Any], spec: GrammarSpec) -> str:
    """Return the right side of a value, and of what stands behind it. Strings are free texts, or one of a few."""
    behind = f" {marker(keyed.after_value, spec)}" if keyed.after_value else ""
    kinds = types_of(schema)
    is_text = "string" in kinds or not kinds
    if is_text and isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
        quote = marker(keyed.quote, spec) if keyed.quote else ""
        texts = [f"{quote} {json.dumps(each)} {quote}" for each in schema["enum"] if isinstance(each, str)]
        if texts and keyed.text_end:
            return f"({' | '.join(texts)}){behind}"
    if not kinds and keyed.quote:
        return f"({marker(keyed.quote, spec)} {text} | %json {json.dumps({'x-guidance': JSON_OPTIONS})})"
    if is_text and keyed.quote:
        return f"{marker(keyed.quote, spec)} {text}"
    if is_text and keyed.after_value:
        return text
    inner = {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": whole.get("x-guidance", JSON_OPTIONS)}
    inner |= {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return f"%json {json.dumps(inner)}{' space' if behind else ''}{behind}"


def text_rules(spec: GrammarSpec, keyed: Keyed, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of a free text, of the lengths that a schema allows, up to what ends it."""
    end = keyed.text_end
    shortest, longest = (each if isinstance(each := schema.get(key), int) else "" for key in _LENGTHS)
    text = f"(?s:.{{{shortest or 0},{longest}}})"
    yield f"{name.upper()}: /{text}{escaped(end)}/ & ~/{ANY_TEXT}{escaped(end)}(?s:.+)/"
    special = spec.special_ids.get(end)
    if special is None:
        yield f"{name}: {name.upper()}"
    else:
        yield f"{name.upper()}_VALUE: /{text}/ & ~/{ANY_TEXT}{escaped(end)}{ANY_TEXT}/"
        yield f"{name}: {name.upper()} | {name.upper()}_VALUE? <[{special}]>"


def literals(part: str, spec: GrammarSpec) -> str:
    """Return the right side of one part."""
    texts = [marker(text, spec) for text in part.split(NUMBER)]
    return " NUMBER ".join(text for text in texts if text != '""') + (" NUMBER" if part.endswith(NUMBER) else "")


def escaped(text: str) -> str:
    """Return a pattern of the text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def marker(text: str, spec: GrammarSpec) -> str:
    """Return the marker as its bytes, what is a special token in it also as that."""
    parts = re.split(f"({'|'.join(map(re.escape, spec.special_ids))})", text) if spec.special_ids else [text]
    ids = [spec.special_ids.get(part) for part in parts]
    written = [
        json.dumps(part) if each is None else f"({json.dumps(part)} | <[{each}]>)"
        for part, each in zip(parts, ids, strict=True)
    ]
    return " ".join(text for text in written if text != '""') or '""'
