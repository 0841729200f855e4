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
    """Whether a call may begin the answer without its marker, is all of the answer, and is the only one."""
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
            before = self.head[: -len(_JSON_HEAD)]
            return "\n".join((*before, text, *self.tail[1:]))
        head = [part.replace(NAME, call["name"]).replace(NUMBER, str(number)) for part in self.head]
        arguments, between = call["arguments"], "" if self.keyed is None or self.keyed.brackets else "\n"
        text = _json(arguments) if self.keyed is None else _rendered_values(self.keyed, arguments)
        parts = [*(part for part in head if not part.startswith("?")), text, *self.tail]
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


_JSON_HEAD = ("{", '"name"', ":", f'"{NAME}"', ",", '"arguments"', ":")
_LLAMA_HEAD = (*_JSON_HEAD[:-2], '"parameters"', ":")
_PARAMETERS = Keyed(("<parameter=",), (">",), "</parameter>")
_NAMED_PARAMETERS = Keyed(('<parameter name="',), ('">',), "</parameter>")
HERMES = ToolFormat("hermes", ("<tool_call>", *_JSON_HEAD), ("}", "</tool_call>"))
_DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_DEEPSEEK_CALL, _DEEPSEEK_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_NAME = "<\uff5ctool\u2581sep\uff5c>"
_ROWS = (  # those that a template is asked for first come first
    ToolFormat(  # Kimi K2
        "kimi",
        ("<|tool_call_begin|>", f"functions.{NAME}:{NUMBER}", "<|tool_call_argument_begin|>"),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        is_in_template=("<|tool_call_argument_begin|>",),
    ),
    ToolFormat(  # DeepSeek V3, R1
        "deepseek_v3",
        (_DEEPSEEK_CALL, "function", _DEEPSEEK_NAME, NAME, "```json"),
        ("```", _DEEPSEEK_END),
        _DEEPSEEK,
        is_in_template=(_DEEPSEEK[0], "```json"),
    ),
    ToolFormat(  # DeepSeek V3.1
        "deepseek_v31",
        (_DEEPSEEK_CALL, NAME, _DEEPSEEK_NAME),
        (_DEEPSEEK_END,),
        _DEEPSEEK,
        is_in_template=(_DEEPSEEK[0],),
    ),
    ToolFormat(  # MiniMax M2
        "minimax",
        (f'<invoke name="{NAME}">',),
        ("</invoke>",),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        _NAMED_PARAMETERS,
        is_in_template=("<minimax:tool_call>",),
    ),
    ToolFormat(  # GLM 4.5 and later
        "glm",
        ("<tool_call>", NAME),
        ("</tool_call>",),
        keyed=Keyed(("<arg_key>",), ("</arg_key>", "<arg_value>"), "</arg_value>"),
        is_in_template=("<arg_key>",),
    ),
    ToolFormat(  # Qwen3-Coder, Qwen3.5, Step 3.5
        "qwen3_coder",
        ("<tool_call>", f"<function={NAME}>"),
        ("</function>", "</tool_call>"),
        keyed=_PARAMETERS,
        is_in_template=("<function=",),
    ),
    ToolFormat(  # FunctionGemma
        "function_gemma",
        ("<start_function_call>", f"call:{NAME}"),
        ("<end_function_call>",),
        keyed=Keyed((), (":",), quote="<escape>", brackets="{}"),
        is_in_template=("<start_function_call>",),
    ),
    ToolFormat(  # Gemma 4
        "gemma4",
        ("<|tool_call>", f"call:{NAME}"),
        ("<tool_call|>",),
        keyed=Keyed((), (":",), quote='<|"|>', brackets="{}"),
        is_in_template=("<|tool_call>",),
    ),
    ToolFormat(  # gpt-oss: the Harmony format
        "harmony",
        ("<|channel|>commentary", f" to=functions.{NAME}", "?<|constrain|>", "?json", "<|message|>"),
        ("<|call|>",),
        is_in_template=("<|channel|>", "to=functions"),
    ),
    ToolFormat(  # Phi 4 mini
        "phi4_mini",
        _JSON_HEAD,
        ("}",),
        ("<|tool_call|>", "<|/tool_call|>"),
        is_list=True,
        is_in_template=("<|tool_call|>",),
    ),
    ToolFormat(  # Mistral since Small 3.2, Magistral, Devstral
        "mistral_args",
        (f"[TOOL_CALLS]{NAME}", f"?[CALL_ID]{NUMBER}", "[ARGS]"),
        (),
        is_in_template=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ToolFormat("mistral", _JSON_HEAD, ("}",), ("[TOOL_CALLS]", ""), is_list=True, is_in_template=("[TOOL_CALLS]",)),
    ToolFormat(  # Llama 4
        "llama4",
        (NAME,),
        (),
        ("<|python_start|>", "<|python_end|>"),
        Keyed((), ("=",), brackets="()"),
        is_list=True,
        is_in_template=("<|python_start|>",),
    ),
    ToolFormat(
        "llama3",
        _LLAMA_HEAD,
        ("}",),
        ("<|python_tag|>", ""),
        is_bare=True,
        is_in_template=('{"name": function name, "parameters":',),
    ),
    HERMES,  # Qwen 2 to 3, Hermes, SmolLM3, and models that know none
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
