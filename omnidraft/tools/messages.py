"""Messages for chat templates: OpenAI's tool calls as templates read them, and tools for templates that know none.

A template that does not read `tools` gets them in the system prompt, calls as the text of the assistant, and results as
messages of the user:

    # Tools

    You may call one or more functions to assist with the user query.

    You are provided with function signatures within <tools></tools> XML tags:
    <tools>
    {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}
    </tools>

    To call functions, answer with nothing but this, and no text behind it:
    <tool_call>
    {"name": <function-name>, "arguments": <args-json-object>}
    </tool_call>
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omnidraft.tools.formats import ToolFormat

Message = Mapping[str, Any]

_CALL_ID_CHARS = 9
"""Mistral's templates refuse ids of any other length."""
_MAX_DEPTH = 100


def call_id(request_id: str, index: int, form: ToolFormat) -> str:
    """Return the id of a call: the same for the same request and index, in the form that the model's template takes."""
    digest = hashlib.sha256(f"{request_id}-{index}".encode()).hexdigest()
    return digest[:_CALL_ID_CHARS] if form.has_short_ids else f"call_{digest[:24]}"


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether tools were called in a conversation."""
    return any(message["role"] == "tool" or _calls(message) for message in messages)


def template_messages(messages: Sequence[Message], form: ToolFormat) -> list[dict[str, Any]]:
    """Return OpenAI's messages for a template that knows tools: content is a text, and arguments are objects. Results
    carry the name of their function."""
    name_of: dict[str | None, str] = {
        call.get("id"): call["function"]["name"] for message in messages for call in _calls(message)
    }
    return [_template_message(message, name_of, form) for message in messages]


def _template_message(message: Message, name_of: Mapping[str | None, str], form: ToolFormat) -> dict[str, Any]:
    made = {**message, "content": message.get("content") or ""}
    made.pop("tool_calls", None)
    if _calls(message):
        made["tool_calls"] = [_template_call(call, form) for call in _calls(message)]
    answered = message.get("tool_call_id")
    if answered is not None:
        made |= {"tool_call_id": _template_id(answered, form)}
        made |= {"name": name_of[answered]} if answered in name_of else {}
    return made


def _template_call(call: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": _arguments(call)}
    return {"id": _template_id(call.get("id") or "", form), "type": "function", "function": function}


def _template_id(given: str, form: ToolFormat) -> str:
    fits = not form.has_short_ids or (len(given) == _CALL_ID_CHARS and given.isalnum())
    return given if fits else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:_CALL_ID_CHARS]


def plain_messages(
    messages: Sequence[Message], definitions: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[dict[str, str]]:
    """Return messages of system, user and assistant only, for a template that knows no tools.

    Messages that follow each other in one role become one where a result is among them: templates want turns.
    """
    made: list[dict[str, str]] = []
    is_after_result = False
    for message in _with_tools(messages, definitions, form):
        is_result = message["role"] == "tool"
        plain = _plain_message(message, form)
        if made and (is_result or is_after_result) and made[-1]["role"] == plain["role"]:
            made[-1]["content"] += "\n" + plain["content"]
        else:
            made.append(plain)
        is_after_result = is_result
    return made


def _plain_message(message: Message, form: ToolFormat) -> dict[str, str]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [{"name": call["function"]["name"], "arguments": _arguments(call)} for call in _calls(message)]
    if calls:
        content = f"{content}\n{form.render(calls)}" if content else form.render(calls)
    return {"role": message["role"], "content": content}


def _with_tools(
    messages: Sequence[Message], definitions: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[Message]:
    """Return the messages with the tools at the end of the system prompt."""
    if not definitions:
        return list(messages)
    tools = _tools_prompt(definitions, form)
    if messages and messages[0]["role"] == "system":
        content = messages[0].get("content") or ""
        return [{**messages[0], "content": f"{content}\n\n{tools}"}, *messages[1:]]
    return [{"role": "system", "content": tools}, *messages]


def _tools_prompt(definitions: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in definitions)
    arguments: Any = "@arguments@" if form.keyed is None else {"<argument-name>": "<argument>"}
    example = form.render([{"name": "@name@", "arguments": arguments}])
    example = example.replace('"@name@"' if form.is_json else "@name@", "<function-name>")
    example = example.replace('"@arguments@"', "<args-json-object>")
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"To call functions, answer with nothing but this, and no text behind it:\n{example}"
    )


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments as a JSON value; as the text that they are where it is none: a model may have written it."""
    given = call["function"]["arguments"]
    if not isinstance(given, str):
        return given
    try:
        parsed = json.loads(given)
        is_text = bool(json.dumps(parsed, ensure_ascii=False).encode())  # no half of a surrogate pair
    except (ValueError, RecursionError):
        return given
    return parsed if is_text and not _is_deep(parsed) else given


def _is_deep(value: Any) -> bool:
    """Return whether arrays and objects are nested too deeply for recursive functions."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in containers for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def map_strings(value: Any, convert: Callable[[str], str]) -> Any:
    """Return a JSON value with every string in it converted, keys too."""
    match value:
        case str():
            return convert(value)
        case Mapping():
            return {map_strings(key, convert): map_strings(each, convert) for key, each in value.items()}
        case list() | tuple():
            return [map_strings(each, convert) for each in value]
    return value


def strings_of(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys too."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, each in value.items():
                yield from strings_of(key)
                yield from strings_of(each)
        case list() | tuple():
            for each in value:
                yield from strings_of(each)
