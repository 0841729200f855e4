"""The grammar of answers that may call tools: free text up to the opening marker of a call, calls, and nothing behind.

A grammar crosses to the compiler, and to the child process that tries it, as JSON: `grammar_text` writes it,
`GrammarSpec.of` reads it, and `lark` turns it into rules of llguidance's language. Markers that a tokenizer has as
special tokens spell nothing, so rules name them by id.
"""

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omnidraft.errors import RequestError
from omnidraft.tools.arguments import types_of
from omnidraft.tools.formats import FORMATS, NAME, NUMBER, Keyed, ToolFormat
from omnidraft.tools.tool_use import MAX_CALLS, Choice, ToolUse

_SPACE = r"[ \t\r\n]"
_ANY_TEXT = "(?s:.*)"
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
"""Keys of a schema that allow and forbid nothing, and may be most of its bytes."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_RAW_VALUES = ("enum", "const")
_LENGTHS = ("minLength", "maxLength")
_MAX_MULTIPLE = 10**18
_JSON_OPTIONS = {"whitespace_pattern": f"{_SPACE}{{0,32}}"}
"""White space that a model may put between two tokens of JSON; without a bound a weak one fills its answer with it."""
_LENIENT_OPTIONS = {**_JSON_OPTIONS, "lenient": True, "coerce_one_of": True}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as the grammar knows it."""

    name: str
    parameters: Mapping[str, Any] | None
    """The schema that arguments match; None: they are any object."""
    is_strict: bool

    def schema(self) -> dict[str, Any]:
        """Return the schema of the arguments, an object's, in the compiler's dialect."""
        options = _JSON_OPTIONS if self.is_strict else _LENIENT_OPTIONS
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

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "GrammarSpec":
        """Return the specification that `grammar_text` wrote as JSON."""
        tools = tuple(CallableTool(**tool) for tool in fields["tools"])
        content = fields["content"] and tuple(fields["content"])
        return GrammarSpec(**{**fields, "tools": tools, "content": content})


def grammar_text(
    use: ToolUse, form: ToolFormat, special_ids: Mapping[str, int], content: tuple[str, str] | None = None
) -> str:
    """Return the specification of the grammar of a request's answers, as JSON.

    Schemas count where arguments must match them: those of strict tools, and of all where a call is required.

    Raises:
        RequestError: the format cannot tell a call from content in a grammar of its own.
    """
    if content is not None and content[0] == "lark":
        raise RequestError("structured_outputs.grammar: it cannot stand beside tools; send a regex or a schema")
    if content is not None and form.is_bare and not use.must_call:
        raise RequestError(
            f"response_format: this model writes calls as JSON ({form.name}), so an answer in JSON looks like one; "
            'send tool_choice "none" or "required" beside it'
        )
    tools = tuple(
        CallableTool(
            tool.name,
            compilable(tool.parameters) if tool.parameters and (tool.is_strict or use.must_call) else None,
            tool.is_strict,
        )
        for tool in use.callable_tools
    )
    max_calls = MAX_CALLS if use.is_parallel and use.named is None and not form.is_bare else 1
    choice: Choice = "required" if use.must_call else use.choice
    spec = GrammarSpec(form.name, choice, max_calls, special_ids, tools, None if use.must_call else content)
    return json.dumps(asdict(spec))


def with_options(schema: Mapping[str, Any], options: Mapping[str, Any] = _JSON_OPTIONS) -> dict[str, Any]:
    """Return the schema with the compiler's options, of which its own go first."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}


def compilable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows the same, without descriptions, and no multiple of so many digits that none ends."""
    kept = {
        key: _compilable_in(key, value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS or key in _NAMED_SCHEMAS
    }
    return {"minimum": -_MAX_MULTIPLE, "maximum": _MAX_MULTIPLE, **kept} if "multipleOf" in kept else kept


def _compilable_in(key: str, value: Any) -> Any:
    match value:
        case Mapping() if key in _NAMED_SCHEMAS:
            return {name: _compilable_in("", each) for name, each in value.items()}
        case Mapping() if key not in _RAW_VALUES:
            return compilable(value)
        case list() if key not in _RAW_VALUES:
            return [_compilable_in("", each) for each in value]
    return value


def lark(spec: GrammarSpec, schemas: Sequence[Mapping[str, Any]], content: str | None) -> str:
    """Return the right side of the start rule, and all further rules.

    Args:
        schemas: the schemas of the tools' arguments, checked.
        content: what answers without calls are, as the right side of a rule; None: any text without a call.
    """
    return "\n".join((_start(spec, has_content=content is not None), *_rules(spec, schemas, content)))


def _start(spec: GrammarSpec, *, has_content: bool) -> str:
    form = FORMATS[spec.format]
    calls = "calls" if form.is_bare else "opening calls"
    if spec.choice == "required":
        return f"opening? {calls}" if form.is_bare and form.opening in spec.special_ids else calls
    if spec.choice == "none":
        return "content"
    if has_content:
        return f"{calls} | content"
    return " | ".join((*_beginnings(spec, form), "content"))


def _beginnings(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the ways in which an answer gets to its calls, after free text or without."""
    special = spec.special_ids.get(form.opening)
    if special is not None:
        yield f"free_text? <[{special}]> calls"
    yield "calls" if form.is_bare else "text_and_opening calls"
    if _may_be_unmarked(form):
        yield f"unmarked{{1,{spec.max_calls}}}"


def _may_be_unmarked(form: ToolFormat) -> bool:
    """Return whether calls without markers keep to their schemas too: models of this notation write them so."""
    return form.name == "hermes"


def _rules(spec: GrammarSpec, schemas: Sequence[Mapping[str, Any]], content: str | None) -> Iterator[str]:
    form = FORMATS[spec.format]
    yield f"content: {content or 'free_text?'}"
    if content is None:
        yield "free_text: FREE_TEXT"
        yield f"FREE_TEXT: /{_ANY_TEXT}/ & ~/{_call_beginning(form)}/{_but_unmarked(form, spec.tools)}"
    if spec.choice == "none":
        return
    if content is None and not form.is_bare and spec.choice == "auto":
        yield f"text_and_opening[suffix={json.dumps(form.opening)}]: ANY_TEXT"
        yield f"ANY_TEXT: /{_ANY_TEXT}/{_but_unmarked(form, spec.tools)}"
    yield f"opening: {_marker(form.opening, spec)}"
    yield f"space: SPACE?\nSPACE: /{_SPACE}{{1,8}}/"
    yield from _call_rules(spec, form)
    for index, (tool, schema) in enumerate(zip(spec.tools, schemas, strict=True)):
        yield f"tool_{index}: {_after_name(form, spec, tool.name)} space arguments_{index}"
        yield from _argument_rules(spec, form, index, schema)
    if form.keyed is not None:
        yield "KEY: /[a-zA-Z0-9_.-]{1,64}/"
        yield from _text_rules(spec, form.keyed, "text", {})
    if content is None and _may_be_unmarked(form) and spec.choice == "auto":
        yield from _unmarked_rules(spec, form)


def _argument_rules(spec: GrammarSpec, form: ToolFormat, index: int, schema: Mapping[str, Any]) -> Iterator[str]:
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
        if isinstance(value, Mapping) and not value.keys().isdisjoint(_LENGTHS):
            yield from _text_rules(spec, keyed, text, value)
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
    yield (
        f"arguments_{index}: {json.dumps(opening)} {values} {json.dumps(closing)}"
        if keyed.brackets
        else (f"arguments_{index}: {values}")
    )


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


def _after_name(form: ToolFormat, spec: GrammarSpec, name: str) -> str:
    """Return the right side of a call from its name up to its arguments."""
    suffix, *others = _split_head(form)[2]
    return " space ".join(filter(None, (f"{json.dumps(name)} {_literals(suffix, spec)}", _sequence(others, spec))))


def _key(keyed: Keyed, key: str, spec: GrammarSpec) -> str:
    """Return the right side of a value's name and of what frames it."""
    before = [_marker(part, spec) for part in keyed.before_key]
    return " ".join((*before, key, " space ".join(_marker(part, spec) for part in keyed.after_key)))


def _value_of(keyed: Keyed, text: str, schema: Any, whole: Mapping[str, Any], spec: GrammarSpec) -> str:
    """Return the right side of a value, and of what stands behind it. Strings are free texts, or one of a few."""
    behind = f" {_marker(keyed.after_value, spec)}" if keyed.after_value else ""
    kinds = types_of(schema)
    is_text = "string" in kinds or not kinds
    if is_text and isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
        quote = _marker(keyed.quote, spec) if keyed.quote else ""
        texts = [f"{quote} {json.dumps(each)} {quote}" for each in schema["enum"] if isinstance(each, str)]
        if texts and (keyed.quote or keyed.after_value):
            return f"({' | '.join(texts)}){behind}"
    if not kinds and keyed.quote:
        return f"({_marker(keyed.quote, spec)} {text} | %json {json.dumps({'x-guidance': _JSON_OPTIONS})})"
    if is_text and keyed.quote:
        return f"{_marker(keyed.quote, spec)} {text}"
    if is_text and keyed.after_value:
        return text
    inner = {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": whole.get("x-guidance", _JSON_OPTIONS)}
    inner |= {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return f"%json {json.dumps(inner)}{' space' if behind else ''}{behind}"


def _text_rules(spec: GrammarSpec, keyed: Keyed, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of a free text, of the lengths that a schema allows, up to what ends it."""
    end = keyed.quote or keyed.after_value
    shortest, longest = (schema.get(key, "") for key in _LENGTHS)
    text = f"(?s:.{{{shortest or 0},{longest}}})"
    yield f"{name.upper()}: /{text}{_escaped(end)}/ & ~/{_ANY_TEXT}{_escaped(end)}(?s:.+)/"
    special = spec.special_ids.get(end)
    if special is None:
        yield f"{name}: {name.upper()}"
    else:
        yield f"{name.upper()}_VALUE: /{text}/ & ~/{_ANY_TEXT}{_escaped(end)}{_ANY_TEXT}/"
        yield f"{name}: {name.upper()} | {name.upper()}_VALUE? <[{special}]>"


def _unmarked_rules(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the rules of calls without markers, from each one's name on: any other JSON is free text. A fence closes as
    one terminal with the space before it, since nothing tells that from the space before another call."""
    calls = [f'UNMARKED_{index} space arguments_{index} space "}}" FENCE?' for index in range(len(spec.tools))]
    yield f"unmarked: {' | '.join(calls)}"
    yield f"FENCE: /{_SPACE}{{0,8}}```/"
    for index, tool in enumerate(spec.tools):
        yield f"UNMARKED_{index}: /{_unmarked_head([tool])}/"


def _unmarked_head(tools: Sequence[CallableTool]) -> str:
    """Return a pattern of a call of one of these tools without a marker, up to its arguments."""
    space, names = f"{_SPACE}{{0,8}}", "|".join(_escaped(tool.name) for tool in tools)
    return rf'{space}(```json{space})?\{{{space}"name"{space}:{space}"({names})"{space},{space}"arguments"{space}:'


def _call_rules(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the rules of calls behind their opening marker. HEAD is one terminal, so that free text can be told from it
    without looking ahead."""
    parts, prefix, _ = _split_head(form)
    yield rf'HEAD: /{_SPACE}{{0,8}}\{{{_SPACE}{{0,8}}"name"/'
    yield "NUMBER: /[a-zA-Z0-9_-]{1,32}/"
    names = " | ".join(f"tool_{index}" for index in range(len(spec.tools)))
    yield f"named: ({names}) space {_sequence(form.tail, spec)}" if form.tail else f"named: {names}"
    yield f"call: {_sequence((*parts, prefix), spec, is_open=True)} named"
    if form.section[0]:
        yield "first: space call"
    else:
        behind = (*parts[1:], prefix) if parts else ()
        yield f"first: space {_sequence(behind, spec, is_open=True)} named"
    closing = f"space {_marker(form.section[1], spec)}" if form.section[1] else ""
    if form.is_list:
        more = _more('space "," space call', spec)
        yield f'calls: space "[" first {more} space "]" {closing}'
    else:
        yield f"calls: first {'' if form.is_bare else _more('space call', spec)} {closing}"


def _split_head(form: ToolFormat) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the parts of a call before that with the tool's name, what stands before the name in it, and what stands
    behind the name."""
    index = next(index for index, part in enumerate(form.head) if NAME in part)
    prefix, _, suffix = form.head[index].partition(NAME)
    return form.head[:index], prefix, (suffix, *form.head[index + 1 :])


def _sequence(parts: Sequence[str], spec: GrammarSpec, *, is_open: bool = False) -> str:
    """Return the right side of parts between which white space may stand; none behind the last one if it `is_open`."""
    written: list[str] = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        space = "" if is_last else " space"
        if part == '"name"' and index and parts[index - 1] == "{":
            written[-1] = f"HEAD{space}"
        elif part.startswith("?"):
            written.append(f"({_literals(part[1:].strip(), spec)} space)?")
        elif part:
            written.append(_literals(part if is_open and is_last else part.strip(), spec) + space)
    return " ".join(written)


def _literals(part: str, spec: GrammarSpec) -> str:
    """Return the right side of one part."""
    texts = [_marker(text, spec) for text in part.split(NUMBER)]
    return " NUMBER ".join(text for text in texts if text != '""') + (" NUMBER" if part.endswith(NUMBER) else "")


def _escaped(text: str) -> str:
    """Return a pattern of the text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def _more(call: str, spec: GrammarSpec) -> str:
    """Return the calls that may follow the first one."""
    return f"({call}){{0,{spec.max_calls - 1}}}" if spec.max_calls > 1 else ""


def _but_unmarked(form: ToolFormat, tools: Sequence[CallableTool]) -> str:
    """Return what takes texts that a call without a marker begins out of a terminal."""
    return f" & ~/{_unmarked_head(tools)}{_ANY_TEXT}/" if _may_be_unmarked(form) and tools else ""


def _call_beginning(form: ToolFormat) -> str:
    """Return a pattern of all texts in which a call begins."""
    anywhere = f"{_ANY_TEXT}{_escaped(form.opening)}{_ANY_TEXT}"
    if not form.is_bare:
        return anywhere
    return rf'({anywhere}|{_SPACE}*\{{{_SPACE}*"name"{_ANY_TEXT})'


def _marker(text: str, spec: GrammarSpec) -> str:
    """Return the marker as its bytes, or its special token."""
    special = spec.special_ids.get(text)
    return json.dumps(text) if special is None else f"({json.dumps(text)} | <[{special}]>)"
