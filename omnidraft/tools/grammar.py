"""The grammar of answers that may call tools: free text up to the opening marker of a call, calls, and nothing behind.

A grammar crosses to the compiler, and to the child process that tries it, as JSON: `grammar_text` writes it,
`GrammarSpec.of` reads it, and `lark` turns it into rules of llguidance's language. Markers that a tokenizer has as
special tokens spell nothing, so rules name them by id.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omnidraft.errors import RequestError
from omnidraft.tools.formats import FORMATS, ToolFormat
from omnidraft.tools.tool_use import MAX_CALLS, Choice, ToolUse

_SPACE = r"[ \t\r\n]"
_ANY_TEXT = "(?s:.*)"
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
"""Keys of a schema that allow and forbid nothing, and may be most of its bytes."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_RAW_VALUES = ("enum", "const")
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
        return with_options({"type": "object", **(self.parameters or {})}, options)


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
    call = "calls" if form.is_bare else "opening calls"
    if spec.choice == "required":
        return f"opening? {call}" if form.is_bare and form.opening in spec.special_ids else call
    if spec.choice == "none":
        return "content"
    if has_content:
        return f"{call} | content"
    return " | ".join((*_beginnings(spec, form), "content"))


def _beginnings(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the ways in which an answer gets to its calls, after free text or without."""
    special = spec.special_ids.get(form.opening)
    if special is not None:
        yield f"free_text? <[{special}]> calls"
    yield "calls" if form.is_bare else "text_and_opening calls"
    if form.may_be_unmarked:
        yield f"unmarked{{1,{spec.max_calls}}}"


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
        key = json.dumps(json.dumps(form.arguments_key))
        name = json.dumps(json.dumps(tool.name))
        yield f'tool_{index}: {name} space "," space {key} space ":" space arguments_{index}'
        yield f"arguments_{index}: %json {json.dumps(schema)}"
    if content is None and form.may_be_unmarked and spec.choice == "auto":
        yield from _unmarked_rules(spec, form)


def _unmarked_rules(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the rules of calls without markers, from each one's name on: any other JSON is free text. A fence closes as
    one terminal with the space before it, since nothing tells that from the space before another call."""
    calls = [f'UNMARKED_{index} space arguments_{index} space "}}" FENCE?' for index in range(len(spec.tools))]
    yield f"unmarked: {' | '.join(calls)}"
    yield f"FENCE: /{_SPACE}{{0,8}}```/"
    for index, tool in enumerate(spec.tools):
        yield f"UNMARKED_{index}: /{_unmarked_head(form, [tool])}/"


def _unmarked_head(form: ToolFormat, tools: Sequence[CallableTool]) -> str:
    """Return a pattern of a call of one of these tools without a marker, up to its arguments."""
    space, names = f"{_SPACE}{{0,8}}", "|".join(re.escape(tool.name) for tool in tools)
    return (
        rf'{space}(```json{space})?\{{{space}"name"{space}:{space}"({names})"'
        rf'{space},{space}"{form.arguments_key}"{space}:'
    )


def _call_rules(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the rules of calls behind their opening marker. HEAD is one terminal, so that free text can be told from it
    without looking ahead."""
    yield rf'HEAD: /{_SPACE}{{0,8}}\{{{_SPACE}{{0,8}}"name"/'
    yield f'call: HEAD space ":" space ({" | ".join(f"tool_{index}" for index in range(len(spec.tools)))}) space "}}"'
    if form.is_list:
        more = _more('space "," call', spec)
        yield f'calls: space "[" call {more} space "]"'
    elif form.closing is None:
        yield "calls: call"
    else:
        closing = _marker(form.closing, spec)
        more = _more("space opening closed", spec)
        yield f"calls: closed {more}\nclosed: call space {closing}"


def _more(call: str, spec: GrammarSpec) -> str:
    """Return the calls that may follow the first one."""
    return f"({call}){{0,{spec.max_calls - 1}}}" if spec.max_calls > 1 else ""


def _but_unmarked(form: ToolFormat, tools: Sequence[CallableTool]) -> str:
    """Return what takes texts that a call without a marker begins out of a terminal."""
    return f" & ~/{_unmarked_head(form, tools)}{_ANY_TEXT}/" if form.may_be_unmarked and tools else ""


def _call_beginning(form: ToolFormat) -> str:
    """Return a pattern of all texts in which a call begins."""
    anywhere = f"{_ANY_TEXT}{re.escape(form.opening)}{_ANY_TEXT}"
    if not form.is_bare:
        return anywhere
    return rf'({anywhere}|{_SPACE}*\{{{_SPACE}*"name"{_ANY_TEXT})'


def _marker(text: str, spec: GrammarSpec) -> str:
    """Return the marker as its bytes, or its special token."""
    special = spec.special_ids.get(text)
    return json.dumps(text) if special is None else f"({json.dumps(text)} | <[{special}]>)"
