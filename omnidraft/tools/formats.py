"""The notations in which models write calls of tools, one row each, and which of them a chat template uses.

Parser and grammar are made from a row. Between two parts of a call white space may stand; a part behind "?" may be
missing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME, NUMBER = "{name}", "{number}"
"""In a part: the name of the tool, and the number of the call or an id."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """Arguments that are no JSON object: one value after the other, each behind its name."""

    before_key: tuple[str, ...]
    """Parts before a name."""
    after_key: tuple[str, ...]
    """Parts between a name and its value."""
    after_value: str = ""
    """The part behind a value, which ends strings too where they have no quotes."""
    quote: str = ""
    """What stands around a string; other values are JSON."""
    brackets: str = ""
    """What stands around all arguments, which commas separate then."""

    @property
    def text_end(self) -> str:
        """What ends a string that stands as it is; empty where strings are JSON."""
        return self.quote or self.after_value


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The notation in which a model writes calls."""

    name: str
    head: tuple[str, ...]
    """The parts of a call before its arguments; the last one with the tool's name may be followed by others."""
    tail: tuple[str, ...]
    """The parts behind its arguments."""
    section: tuple[str, str] = ("", "")
    """The markers before the first call and behind the last one."""
    keyed: Keyed | None = None
    """None: arguments are a JSON object."""
    is_list: bool = False
    """Whether all calls of an answer are one array."""
    is_bare: bool = False
    """Whether a call may begin the answer without its marker, and is all of the answer."""
    is_single: bool = False
    """Whether an answer ends with its first call."""
    is_in_template: tuple[str, ...] = ()
    """A chat template that holds all of these texts teaches this notation."""

    @property
    def opening(self) -> str:
        """The marker that begins calls inside a text. A tokenizer may have it as a special token, which spells
        nothing."""
        return self.section[0] or self.head[0].partition("{")[0]

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object with its name and arguments."""
        return '"name"' in self.head

    @property
    def has_short_ids(self) -> bool:
        """Whether its templates refuse ids of calls that have not nine letters."""
        return self.opening == "[TOOL_CALLS]"

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that frame a call and its values."""
        keyed = () if self.keyed is None else (*self.keyed.before_key, *self.keyed.after_key, self.keyed.after_value)
        parts = (*self.section, *self.head, *self.tail, *keyed, self.keyed.quote if self.keyed else "")
        return tuple(dict.fromkeys(marker for part in parts for marker in _markers_in(part)))

    def render(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls, each with a name and arguments."""
        texts = [self._rendered(number, each) for number, each in enumerate(calls)]
        if self.is_list:
            return f"{self.section[0]}[{', '.join(texts)}]{self.section[1]}"
        if self.is_bare:
            return "; ".join(texts)
        return "\n".join(part for part in (self.section[0], *texts, self.section[1]) if part)

    def _rendered(self, number: int, call: Mapping[str, Any]) -> str:
        if self.is_json:
            key = self.head[-2].strip('"')
            text = json.dumps({"name": call["name"], key: call["arguments"]}, ensure_ascii=False)
            before = self.head[: self.head.index("{")]
            return "\n".join((*before, text, *self.tail[1:]))
        head = [part.replace(NAME, call["name"]).replace(NUMBER, str(number)) for part in self.head]
        arguments, between = call["arguments"], "" if self.keyed is None or self.keyed.brackets else "\n"
        text = _json(arguments) if self.keyed is None else _rendered_values(self.keyed, arguments)
        parts = [
            *(part for part in head if not part.startswith("?")),
            text,
            *(part.removeprefix("?") for part in self.tail),
        ]
        return between.join(part for part in parts if part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _rendered_values(keyed: Keyed, arguments: Any) -> str:
    rendered = []
    if not isinstance(arguments, Mapping):  # a model was cut off in them
        return str(arguments)
    for key, value in arguments.items():
        is_text = isinstance(value, str) and keyed.text_end
        text = f"{keyed.quote}{value}{keyed.quote}" if is_text else _json(value)
        rendered.append("".join((*keyed.before_key, key, *keyed.after_key, text, keyed.after_value)))
    if keyed.brackets:
        return ",".join(rendered).join(keyed.brackets)
    return "\n".join(rendered)


_MARKER = re.compile(r"<[^<>{}\s][^<>]*>|\[[A-Z_]+\]")


def _markers_in(part: str) -> list[str]:
    """Return what may be a token of its own in a part."""
    return [] if NAME in part and not part.startswith(("[", "<|")) else _MARKER.findall(part.replace(NAME, ""))


_HERMES_CALL = '{ "name" : "{name}" , "arguments" : {arguments} }'


def _row(
    name: str,
    notation: str,
    *is_in_template: str,
    keyed: Keyed | None = None,
    is_list: bool = False,
    is_bare: bool = False,
    is_single: bool = False,
) -> ToolFormat:
    """Return the format of a notation. Its spaces are those between parts, and "~" is a space that has to be there;
    slashes part a section's markers from its calls."""
    before, call, behind = notation.split(" / ") if " / " in notation else ("", notation, "")
    head, tail = (tuple(part.replace("~", " ") for part in text.split()) for text in call.split("{arguments}"))
    return ToolFormat(name, head, tail, (before, behind), keyed, is_list, is_bare, is_single, is_in_template)


_PARAMETERS = Keyed(("<parameter=",), (">",), "</parameter>")
_NAMED_PARAMETERS = Keyed(('<parameter name="',), ('">',), "</parameter>")
_GLM_VALUES = Keyed(("<arg_key>",), ("</arg_key>", "<arg_value>"), "</arg_value>")
_OLD_GEMMA, _GEMMA = (Keyed((), (":",), quote=quote, brackets="{}") for quote in ("<escape>", '<|"|>'))
_PYTHON = Keyed((), ("=",), brackets="()")
_CALLS, _CALLS_END, _CALL, _CALL_END, _NAME = (
    f"<\uff5ctool\u2581{what}\uff5c>"
    for what in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
"""DeepSeek's markers."""
_KIMI, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL = "<|tool_call_begin|> functions.{name}:{number} <|tool_call_argument_begin|> {arguments} <|tool_call_end|>"
_DEEPSEEK_V3 = f"{_CALL} function {_NAME} {{name}} ```json {{arguments}} ``` {_CALL_END}"
_DEEPSEEK_V31 = f"{_CALL} {{name}} {_NAME} {{arguments}} {_CALL_END}"
_MINIMAX = '<minimax:tool_call> / <invoke~name="{name}"> {arguments} </invoke> / </minimax:tool_call>'
_QWEN3_CODER = "<tool_call> <function={name}> {arguments} </function> </tool_call>"
_FUNCTION_GEMMA = "<start_function_call> call:{name} {arguments} <end_function_call>"
_LLAMA4 = "<|python_start|> / {name} {arguments} / <|python_end|>"
_GPT_OSS = "<|channel|>commentary ~to=functions.{name} ?<|constrain|> ?json <|message|> {arguments} ?<|call|>"
_LLAMA3 = '<|python_tag|> / { "name" : "{name}" , "parameters" : {arguments} } / '
HERMES = _row("hermes", f"<tool_call> {_HERMES_CALL} </tool_call>")  # Qwen 2 to 3, SmolLM3, and models that know none
_ROWS = (  # those that a template is asked for first come first
    _row("kimi", f"{_KIMI} / {_KIMI_CALL} / {_KIMI_END}", "<|tool_call_argument_begin|>"),  # K2
    _row("deepseek_v3", f"{_CALLS} / {_DEEPSEEK_V3} / {_CALLS_END}", _CALLS, "```json"),  # and R1
    _row("deepseek_v31", f"{_CALLS} / {_DEEPSEEK_V31} / {_CALLS_END}", _CALLS),
    _row("minimax", _MINIMAX, "<minimax:tool_call>", keyed=_NAMED_PARAMETERS),  # M2
    _row("glm", "<tool_call> {name} {arguments} </tool_call>", "<arg_key>", keyed=_GLM_VALUES),  # 4.5 and later
    _row("qwen3_coder", _QWEN3_CODER, "<function=", keyed=_PARAMETERS),  # and Qwen3.5, Step 3.5
    _row("function_gemma", _FUNCTION_GEMMA, "<start_function_call>", keyed=_OLD_GEMMA),
    _row("gemma4", "<|tool_call> call:{name} {arguments} <tool_call|>", "<|tool_call>", keyed=_GEMMA),
    _row("harmony", _GPT_OSS, "<|channel|>", "to=functions", is_single=True),  # its last marker may end the text
    _row("phi4_mini", f"<|tool_call|> / {_HERMES_CALL} / <|/tool_call|>", "<|tool_call|>", is_list=True),
    _row("mistral_args", "[TOOL_CALLS]{name} ?[CALL_ID]{number} [ARGS] {arguments}", "[TOOL_CALLS]", "[ARGS]"),
    _row("mistral", f"[TOOL_CALLS] / {_HERMES_CALL} / ", "[TOOL_CALLS]", is_list=True),  # before Small 3.2
    _row("llama4", _LLAMA4, "<|python_start|>", keyed=_PYTHON, is_list=True),
    _row("llama3", _LLAMA3, '{"name": function name, "parameters":', is_bare=True, is_single=True),
    HERMES,
)
FORMATS: Mapping[str, ToolFormat] = {row.name: row for row in _ROWS}


_GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""A tag of transformers, around what the assistant says."""


def detect(chat_template: str) -> ToolFormat:
    """Return the format of a chat template's own calls; `hermes` where it shows none."""
    shown = [row for row in _ROWS if row.is_in_template and all(text in chat_template for text in row.is_in_template)]
    if "<|python_tag|>" in chat_template:
        shown.append(FORMATS["llama3"])
    return shown[0] if shown else HERMES


def knows_tools(chat_template: str) -> bool:
    """Return whether a chat template reads `tools`. One that is no Jinja does not."""
    from jinja2 import Environment, TemplateError, meta  # not for the process that tries grammars

    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        return "tools" in meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", chat_template)))
    except TemplateError:
        return False
