"""Saved responses with receipts, whole or as the events of a stream, and where they show what their ids do not say.

Model, text, thoughts, calls of tools and why the answer ended are compared as this server writes them.
Log-probabilities and usage are not.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from omnidraft.decode.common_prefix import common_prefix
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.prompting import Pair
from omnidraft.decode.stop_checker import StopChecker
from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason, Request
from omnidraft.serving.answer_reader import AnswerReader
from omnidraft.serving.response_formats import ChoicePart
from omnidraft.tools.tool_use import Tool, ToolUse

NUM_SHOWN = 40
"""The characters of a text that are told."""
_THOUGHTS, _TEXTS = ("reasoning", "reasoning_content"), ("content", "text")


@dataclass(frozen=True, slots=True)
class SavedChoice:
    """A receipt and the choice that it is of; or a choice beside others that lacks one."""

    envelope: dict[str, Any] | None
    around: dict[str, Any]
    """The fields of all objects around the receipt, inner ones first."""
    pieces: Sequence[dict[str, Any]]
    """The same of the choice; of all its parts where it was streamed."""
    streamed: Mapping[str, str] = field(default_factory=dict)
    """What the events of OpenAI's Responses showed of an item, by its id."""

    def ids(self, name: str) -> Any:
        """Return the ids of this field, joined; None where it is missing."""
        parts = [each[name] for each in self.pieces if name in each]
        return list(chain(*parts)) if all(isinstance(each, list) for each in parts) and parts else self.around.get(name)

    @property
    def finish_reason(self) -> Any:
        """Why it ended, as its last part says; None where none does."""
        return next((each["finish_reason"] for each in reversed(self.pieces) if each.get("finish_reason")), None)

    def texts(self) -> dict[str, str]:
        """Return what the choice shows, by field."""
        messages = list(self._messages())
        return {
            name: "".join(str(each[name]) for each in messages if each.get(name) is not None)
            for name in _TEXTS + _THOUGHTS
            if any(name in each for each in messages)
        }

    def calls(self) -> list[tuple[str, str]]:
        """Return the name and the arguments of each call."""
        calls: list[tuple[str, str]] = []
        for function in (
            each.get("function") for message in self._messages() for each in _dicts(message, "tool_calls")
        ):
            name, arguments = map(function.get, ("name", "arguments")) if isinstance(function, dict) else (None, None)
            if calls and name is None:
                name, before = calls.pop()
                arguments = f"{before}{arguments}"
            calls.append((str(name), str(arguments)))
        return calls

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages, or parts of one, as chats have them."""
        if "output" in self.around:
            yield from map(_message, _dicts(self.around, "output") or [{}])
            return
        for piece in self.pieces:
            message = piece.get("message", piece.get("delta", piece))
            yield message if isinstance(message, dict) else {"content": message}


def saved_choices(content: bytes) -> list[SavedChoice]:
    """Return the choices with receipts anywhere in JSON, or in the events of a stream as they came over the wire.
    Raises ValueError, RecursionError where it is neither."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    pieces = defaultdict[tuple[str, ...], list[dict[str, Any]]](list)
    prompts: dict[str, dict[str, Any]] = {}  # of a stream, whose first event alone may have it
    streamed = defaultdict[str, str](str)

    def visit(data: Any, around: dict[str, Any]) -> None:
        if isinstance(data, dict) and "payloadType" in data:
            found.append((data, around))
        elif isinstance(data, dict):
            around = around | data
            if "prompt_token_ids" in data:
                prompts.setdefault(_key(around)[0], {"prompt_token_ids": data["prompt_token_ids"]})
            if "finish_reason" in data:
                pieces[_key(around)].append(around)
            if isinstance(data.get("delta"), str):
                streamed[str(data.get("item_id"))] += data["delta"]
            for each in data.values():
                visit(each, around)
        elif isinstance(data, list):
            for each in data:
                visit(each, around)

    events = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
    visit([json.loads(each) for each in events if each != b"[DONE]"] if events else json.loads(content), {})
    lacking = pieces.keys() - {_key(around) for _, around in found} if found else ()
    return [
        SavedChoice(envelope, prompts.get(_key(around)[0], {}) | around, pieces.get(_key(around), [around]), streamed)
        for envelope, around in (*found, *((None, pieces[key][-1]) for key in sorted(lacking)))
    ]


def compare(
    choice: SavedChoice, model: str, pair: Pair, request: Request, answer_ids: Sequence[int]
) -> tuple[str | None, str]:
    """Compare what a choice shows with its ids, and with the name of the model in its receipt.

    Returns:
        Where it differs first, None where it does not; and what was compared and what not, in words.
    """
    checker = StopChecker(request, pair.target_tokenizer.vocabulary)
    for token in answer_ids:
        checker.ends(token)
    text, calls, texts = checker.take(), choice.calls(), choice.texts()
    if named := [each["model"] for each in choice.pieces if each.get("model", model) != model]:
        return f": the response has the model {named[0]!r}, its receipt {model!r}", ""
    for item in _dicts(choice.around, "output"):
        shown, expected = choice.streamed.get(str(item.get("id"))), _text_of(item)
        if shown is not None and shown != expected:
            return _difference("its stream", shown, expected, "its last event has"), ""
    if not texts and not calls:
        return None, f"; no text is beside it to compare, it begins {text[:NUM_SHOWN]!r}"
    tools = [each for each in _dicts(choice.around, "tools") if isinstance(each.get("parameters"), dict)]
    schemas = {str(tool.get("name")): tool["parameters"] for tool in tools}
    try:
        offered = [Tool(name, parameters=schemas.get(name)) for name in dict.fromkeys(name for name, _ in calls)]
        reader = AnswerReader(
            GenerationRequest(tools=ToolUse(tuple(offered)) if offered else None),
            pair.tool_format,
            pair.reasoning_format,
            request.thoughts,
        )
    except RequestError as exc:
        return f": {exc}", ""
    part, whole = ChoicePart(0, True, finish_reason="stop"), ChoicePart(0, True)
    if checker.finish_reason is FinishReason.LENGTH:
        part.finish_reason = "length"
    reader.read(text, part)
    whole.add(part)
    prompt = pair.target_tokenizer.vocabulary.spell(request.prompt_ids).decode("utf-8", "replace")
    for name, shown in texts.items():
        expected = whole.thoughts if name in _THOUGHTS else whole.text
        if name == "text" and shown.startswith(prompt) and shown != expected:  # it may be echoed
            expected = prompt + expected
        if shown != expected:
            return _difference(name, shown, expected), ""
    written = [(each.name or "", each.arguments) for each in whole.calls]
    is_ended = any("finish_reason" in each for each in choice.pieces)
    if is_ended and choice.finish_reason != whole.finish_reason:
        return f": the response has ended by {choice.finish_reason!r}, its ids by {whole.finish_reason!r}", ""
    names, compared = [name for name, _ in calls], list(texts)
    if names != [name for name, _ in written]:
        return f" in its calls: the response has {names}, its ids call {[name for name, _ in written]}", ""
    left_out = "" if set(_THOUGHTS) & set(texts) or not whole.thoughts else "; its thoughts are not shown"
    for (name, shown), (_, expected) in zip(calls, written, strict=True):
        if shown != expected and reader.is_typed_by_schemas and schemas.get(name) is None:
            left_out += f"; the arguments of {name} were not compared, as its schema, which types them, is not here"
        elif shown != expected:
            return _difference(f"the arguments of {name}", shown, expected), ""
    return None, f", {', '.join([*compared, *(['tool calls'] if calls else [])])} too{left_out}"


def _difference(name: str, shown: str, expected: str, whose: str = "its ids say") -> str:
    at = common_prefix(shown, expected)
    has, say = (repr(each[at : at + NUM_SHOWN]) if at < len(each) else "its end" for each in (shown, expected))
    return f" at character {at} of {name}: the response has {has}, {whose} {say}"


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of a response of OpenAI's Responses as chats have it."""
    if item.get("type") == "function_call":
        return {"tool_calls": [{"function": item}]}
    return {"reasoning" if item.get("type") == "reasoning" else "content": _text_of(item)}


def _text_of(item: Mapping[str, Any]) -> str:
    """Return what the events of a stream show of such an item."""
    if item.get("type") == "function_call":
        return str(item.get("arguments"))
    return "".join(str(each.get("text")) for each in _dicts(item, "content"))


def _dicts(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = fields.get(name)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _key(around: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which choice of which response this is."""
    return str(around.get("id")), str(around.get("index"))
