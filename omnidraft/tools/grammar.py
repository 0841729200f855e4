"""The grammar of answers that may call tools: free text up to the opening marker of a call, calls, and nothing behind.

A grammar crosses to the compiler, and to the child process that tries it, as JSON: `grammar_text` writes it,
`GrammarSpec.of` reads it, and `lark` turns it into rules of llguidance's language. Markers that a tokenizer has as
special tokens spell nothing, so rules name them by id.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from omnidraft.errors import RequestError
from omnidraft.tools.argument_grammar import (
    ANY_TEXT,
    SPACE,
    CallableTool,
    GrammarSpec,
    argument_rules,
    escaped,
    literals,
    marker,
    text_rules,
)
from omnidraft.tools.formats import FORMATS, NAME, ToolFormat
from omnidraft.tools.tool_use import MAX_CALLS, Choice, ToolUse

_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
"""Keys of a schema that allow and forbid nothing, and may be most of its bytes."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_RAW_VALUES = ("enum", "const")
_MAX_MULTIPLE = 10**18


def grammar_text(
    use: ToolUse | None,
    form: ToolFormat,
    special_ids: Mapping[str, int],
    content: tuple[str, str] | None = None,
    header: str = "",
) -> str:
    """Return the specification of the grammar of a request's answers, as JSON.

    Schemas count where arguments must match them: those of strict tools, and of all where a call is required.

    Raises:
        RequestError: the format cannot tell a call from content in a grammar of its own.
    """
    if content is not None and content[0] == "lark":
        beside = "beside tools, nor behind the channels of gpt-oss"
        raise RequestError(f"structured_outputs.grammar: it cannot stand {beside}; send a regex or a schema")
    if use is None:
        return json.dumps(asdict(GrammarSpec(form.name, "none", 0, special_ids, (), content, header)))
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
    max_calls = MAX_CALLS if use.is_parallel and use.named is None and not form.is_single else 1
    choice: Choice = "required" if use.must_call else use.choice
    spec = GrammarSpec(form.name, choice, max_calls, special_ids, tools, None if use.must_call else content, header)
    return json.dumps(asdict(spec))


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
    if has_content or spec.header:
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
    yield f"content: {marker(spec.header, spec)} {content or 'free_text?'}"
    if content is None:
        yield "free_text: FREE_TEXT"
        yield f"FREE_TEXT: /{ANY_TEXT}/ & ~/{_call_beginning(form)}/{_but_unmarked(form, spec.tools)}"
    if spec.choice == "none":
        return
    if content is None and not (form.is_bare or spec.header) and spec.choice == "auto":
        yield f"text_and_opening[suffix={json.dumps(form.opening)}]: ANY_TEXT"
        yield f"ANY_TEXT: /{ANY_TEXT}/{_but_unmarked(form, spec.tools)}"
    yield f"opening: {marker(form.opening, spec)}"
    yield f"space: SPACE?\nSPACE: /{SPACE}{{1,8}}/"
    yield from _call_rules(spec, form)
    for index, (tool, schema) in enumerate(zip(spec.tools, schemas, strict=True)):
        yield f"tool_{index}: {_after_name(form, spec, tool.name)} space arguments_{index}"
        yield from argument_rules(spec, form, index, schema)
    if form.keyed is not None:
        yield "KEY: /[a-zA-Z0-9_.-]{1,64}/"
        if form.keyed.text_end:
            yield from text_rules(spec, form.keyed, "text", {})
    if content is None and _may_be_unmarked(form) and spec.choice == "auto":
        yield from _unmarked_rules(spec, form)


def _after_name(form: ToolFormat, spec: GrammarSpec, name: str) -> str:
    """Return the right side of a call from its name up to its arguments."""
    suffix, *others = _split_head(form)[2]
    return " space ".join(filter(None, (f"{json.dumps(name)} {literals(suffix, spec)}", _sequence(others, spec))))


def _unmarked_rules(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the rules of calls without markers, from each one's name on: any other JSON is free text. A fence closes as
    one terminal with the space before it, since nothing tells that from the space before another call."""
    calls = [f'UNMARKED_{index} space arguments_{index} space "}}" FENCE?' for index in range(len(spec.tools))]
    yield f"unmarked: {' | '.join(calls)}"
    yield f"FENCE: /{SPACE}{{0,8}}```/"
    for index, tool in enumerate(spec.tools):
        yield f"UNMARKED_{index}: /{_unmarked_head([tool])}/"


def _unmarked_head(tools: Sequence[CallableTool]) -> str:
    """Return a pattern of a call of one of these tools without a marker, up to its arguments."""
    space, names = f"{SPACE}{{0,8}}", "|".join(escaped(tool.name) for tool in tools)
    return rf'{space}(```json{space})?\{{{space}"name"{space}:{space}"({names})"{space},{space}"arguments"{space}:'


def _call_rules(spec: GrammarSpec, form: ToolFormat) -> Iterator[str]:
    """Yield the rules of calls behind their opening marker. HEAD is one terminal, so that free text can be told from it
    without looking ahead."""
    parts, prefix, _ = _split_head(form)
    yield rf'HEAD: /{SPACE}{{0,8}}\{{{SPACE}{{0,8}}"name"/'
    yield "NUMBER: /[a-zA-Z0-9_-]{1,32}/"
    names = " | ".join(f"tool_{index}" for index in range(len(spec.tools)))
    yield f"named: ({names}) space {_sequence(form.tail, spec)}" if form.tail else f"named: {names}"
    yield f"call: {_sequence((*parts, prefix), spec, is_open=True)} named"
    if form.section[0]:
        yield "first: space call"
    else:
        behind = (*parts[1:], prefix) if parts else ()
        yield f"first: space {_sequence(behind, spec, is_open=True)} named"
    closing = f"space {marker(form.section[1], spec)}" if form.section[1] else ""
    if form.is_list:
        more = _more('space "," space call', spec)
        yield f'calls: space "[" first {more} space "]" {closing}'
    else:
        yield f"calls: first {'' if form.is_single else _more('space call', spec)} {closing}"


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
            written.append(f"({literals(part[1:].strip(), spec)} space)?")
        elif part:
            written.append(literals(part if is_open and is_last else part.strip(), spec) + space)
    return " ".join(written)


def _more(call: str, spec: GrammarSpec) -> str:
    """Return the calls that may follow the first one."""
    return f"({call}){{0,{spec.max_calls - 1}}}" if spec.max_calls > 1 else ""


def _but_unmarked(form: ToolFormat, tools: Sequence[CallableTool]) -> str:
    """Return what takes texts that a call without a marker begins out of a terminal."""
    return f" & ~/{_unmarked_head(tools)}{ANY_TEXT}/" if _may_be_unmarked(form) and tools else ""


def _call_beginning(form: ToolFormat) -> str:
    """Return a pattern of all texts in which a call begins."""
    anywhere = f"{ANY_TEXT}{escaped(form.opening)}{ANY_TEXT}"
    if not form.is_bare:
        return anywhere
    return rf'({anywhere}|{SPACE}*\{{{SPACE}*"name"{ANY_TEXT})'
