"""The formats in which models write calls, and which of them a chat template uses.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Qwen, Hermes, and models that know none; small
                                                                         ones write the JSON alone, or in a fence
llama3   {"name": ..., "parameters": {...}}, or behind <|python_tag|>    Llama 3
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]            Mistral
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The notation in which a model writes calls."""

    name: str
    opening: str
    """The marker that begins calls inside a text. A tokenizer may have it as a special token, which spells nothing."""
    closing: str | None = None
    """The marker behind each call."""
    arguments_key: str = "arguments"
    is_list: bool = False
    """Whether all calls of an answer are one JSON array behind one opening marker."""
    may_be_unmarked: bool = False
    """Whether calls that begin an answer may stand without their markers, or in a fence of Markdown."""
    is_bare: bool = False
    """Whether a call may begin the answer without its marker, is all of the answer, and is the only one."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that frame a call."""
        return (self.opening,) if self.closing is None else (self.opening, self.closing)

    def render(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls, each with a name and arguments."""
        objects = [_dumped({"name": each["name"], self.arguments_key: each["arguments"]}) for each in calls]
        if self.is_list:
            return f"{self.opening}[{', '.join(objects)}]"
        if self.is_bare:
            return "; ".join(objects)
        return "\n".join(f"{self.opening}\n{each}\n{self.closing}" for each in objects)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", may_be_unmarked=True)
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3": ToolFormat("llama3", "<|python_tag|>", arguments_key="parameters", is_bare=True),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", is_list=True),
}


_GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""A tag of transformers, around what the assistant says."""


def detect(chat_template: str) -> ToolFormat:
    """Return the format of a chat template's own calls; `hermes` where it shows none."""
    for name in ("mistral", "llama3"):
        if FORMATS[name].opening in chat_template:
            return FORMATS[name]
    if '{"name": function name, "parameters":' in chat_template:
        return FORMATS["llama3"]
    return HERMES


def knows_tools(chat_template: str) -> bool:
    """Return whether a chat template reads `tools`. One that is no Jinja does not."""
    from jinja2 import Environment, TemplateError, meta  # not for the process that tries grammars

    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        return "tools" in meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", chat_template)))
    except TemplateError:
        return False


def _dumped(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
