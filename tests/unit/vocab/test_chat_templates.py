"""Chats become the ids that transformers makes of them with the same template, and a template's refusal is the
client's."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from omnidraft.errors import RequestError
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.tools.formats import knows_tools
from tests.unit.tools import templates
from tests.unit.vocab.conftest import byte_level, saved

PUBLISHED = {path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
IN_THE_MANNER_OF = {
    "Qwen 2.5": templates.QWEN2_5,
    "Llama 3": templates.LLAMA3,
    "Mistral": templates.MISTRAL,
    "Gemma 3": templates.GEMMA3,
    "ChatML": templates.CHATML,
    "gpt-oss": """
{%- macro described(tool) -%}
    {{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (' + tool.parameters | tojson(indent=2) + ') => any;' }}
{%- endmacro -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\\nReasoning: ' }}
{{- reasoning_effort | default('medium') + '<|end|>' }}
{%- for tool in tools or [] %}{{- '\\n\\n' + described(tool.function) }}{%- endfor %}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
        {%- continue -%}
    {%- endif -%}
    {{- '<|start|>' + message.role }}
    {%- if 'thinking' in message %}{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- ' to=functions.' + call.function.name + '<|message|>' + call.function.arguments | tojson + '<|call|>' }}
    {%- endfor %}
    {{- '<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    "SmolLM3": """
{%- set ns = namespace(thinks=enable_thinking | default(true), last=-1) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
## Today: {{ strftime_now("%d %B %Y") }} Mode: {{ '/think' if ns.thinks else '/no_think' }}
{%- for tool in tools or [] %}
{{ tool | string }}
{%- endfor %}
{% for message in messages %}
<|im_start|>{{ message.role }}
    {%- if message.role == 'assistant' %}
{% generation %}
{%- if loop.index0 > ns.last and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}{{ (message.tool_calls or []) | map(attribute='function') | map('tojson') | join(';') }}<|im_end|>
{% endgeneration %}
    {%- else %}
{{ message.content.split('</think>')[-1].strip() }}<|im_end|>
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{{ '' if ns.thinks else '<think>\n\n</think>\n' }}{% endif %}""",
    "Granite": """
{%- if messages[0].role == 'system' %}{% set said = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set said = 'Knowledge Cutoff Date: April 2024.' %}{% set rest = messages %}{% endif -%}
<|start_of_role|>system<|end_of_role|>{{ said }}{{ nowhere_defined }}{{ (controls or {}).get('length') }}
{% for m in rest %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m['content'] if m.content is defined else m.text }}
    {%- if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}<|end_of_text|>
{% endfor %}
{%- if tools %}{{ tools[0].function.parameters.properties | dictsort }}{{ tools | length }}{% endif %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}""",
}
"""What their makers use of Jinja: macros, namespaces, loop controls, blocks of what is generated, the date."""

QUESTION = {"role": "user", "content": "Where does the \u201criver\u201d go?\n"}
ANSWER = {"role": "assistant", "content": " Into the sea. ", "reasoning_content": "Water\nflows."}
SYSTEM = {"role": "system", "content": "Be <b>brief</b>."}


def called(index: int, name: str, **arguments: object) -> dict[str, Any]:
    return {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


CALL = {"role": "assistant", "content": "", "tool_calls": [called(1, "look_up", word="caf\u00e9", number=3)]}
CALLS = {**ANSWER, "tool_calls": [called(1, "look_up", word="a \"b\""), called(2, "now")]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "look_up", "content": '{"found": "a drink"}'}
SECOND = {"role": "tool", "tool_call_id": "abcdefgh2", "name": "now", "content": "12"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks <up> \u00e9",
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in (("look_up", {"word": {"type": "string"}, "number": {"type": "integer"}}), ("now", {}))
]
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]] = {
    "question": ([QUESTION], [], {}),
    "system": ([SYSTEM, QUESTION], [], {}),
    "turns": ([SYSTEM, QUESTION, ANSWER, QUESTION], [], {}),
    "two questions": ([QUESTION, QUESTION], [], {}),
    "thinks": ([QUESTION], [], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    "thinks not": ([QUESTION], [], {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
    "variables": ([QUESTION], [], {"controls": {"length": "long"}, "nowhere_defined": "here", "date_string": "4 Jul"}),
    "tools": ([SYSTEM, QUESTION], TOOLS, {}),
    "call": ([QUESTION, CALL, RESULT], TOOLS, {}),
    "calls": ([QUESTION, CALLS, RESULT, SECOND, ANSWER, QUESTION], TOOLS, {}),
}


@pytest.fixture(scope="module", params=[*PUBLISHED, *IN_THE_MANNER_OF])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (PUBLISHED | IN_THE_MANNER_OF)[request.param]
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return saved(byte_level(330, normalizes=False), tmp_path_factory.mktemp("chat"), chat_template=template, **tokens)


def theirs(folder: Path, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), **options: Any) -> list[int]:
    """The ids of transformers. Raises RequestError where the template does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        return tokenizer.apply_chat_template(list(messages), tools=list(tools) or None, return_dict=False, **options)
    except Exception as exc:  # a template raises what it likes
        raise RequestError(str(exc)) from exc


def as_sent(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a client, whose arguments are texts."""
    sent = json.loads(json.dumps(messages))
    for function in (call["function"] for message in sent for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"])
    return sent


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_has_the_ids_of_transformers_or_is_refused_as_there(folder: Path, chat: str) -> None:
    messages, tools, options = CHATS[chat]
    ours = HfTokenizer(folder)
    if tools and not knows_tools((folder / "chat_template.jinja").read_text()):
        pytest.skip("the template knows no tools")
    day = datetime.now().date()
    try:
        expected: list[int] | None = theirs(folder, messages, tools, add_generation_prompt=True, **options)
    except RequestError:
        expected = None
    if expected is None:
        with pytest.raises(RequestError, match="the chat template refuses these messages"):
            ours.chat_prompt_ids(as_sent(messages), tools, options=options)
    else:
        found = ours.chat_prompt_ids(as_sent(messages), tools, options=options)
        assert found == expected or day != datetime.now().date()


@pytest.mark.parametrize("said", ["Into the", "Into the ", "e", "s", "im", "<|im_end|>", ""])
def test_an_answer_goes_on_behind_the_last_message(folder: Path, said: str) -> None:
    """Also where the marker that ends a message holds what it says."""
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": said}]
    ours = HfTokenizer(folder)
    found = ours.vocabulary.spell(ours.chat_prompt_ids(messages, continues_last=True))
    plain = [*messages[:-1], {**messages[-1], "content": said.replace("<|im_end|>", "zzz")}]
    expected = theirs(folder, plain, continue_final_message=True)
    assert found == ours.vocabulary.spell(expected).replace(b"zzz", b"<|im_end|>")


def test_a_call_without_content_is_one_with_none(folder: Path) -> None:
    """OpenAI's clients send null, of which many templates make an error or the word None."""
    ours, messages = HfTokenizer(folder), as_sent([QUESTION, CALL, RESULT])
    without = [messages[0], {**messages[1], "content": None}, messages[2]]
    assert ours.chat_prompt_ids(without, TOOLS) == ours.chat_prompt_ids(messages, TOOLS)


def test_what_a_template_refuses_is_said_in_one_line(tmp_path: Path) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one only\\nof these') }}{% endif %}{{ 1 + 'a' }}"
    folder = saved(byte_level(330, normalizes=False), tmp_path, chat_template=template)
    with pytest.raises(RequestError, match=r"these messages: one only$"):
        HfTokenizer(folder).chat_prompt_ids([QUESTION, QUESTION])
    with pytest.raises(RequestError, match="these messages: unsupported operand"):
        HfTokenizer(folder).chat_prompt_ids([QUESTION])
