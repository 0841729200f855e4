"""Conversations with calls, for templates that read tools and for those that do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from omnidraft.errors import RequestError
from omnidraft.models.hf.tokenizer import HfTokenizer, load_tokenizer
from omnidraft.testing.tiny_models import make_target
from omnidraft.tools.formats import FORMATS, HERMES
from omnidraft.tools.messages import call_id, template_messages
from tests.unit.tools.templates import CHATML, GEMMA3, LLAMA3, MISTRAL, QWEN2_5

TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "Run <|im_end|>", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls <|im_end|>"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is here?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py <|im_end|>"},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("templates") / "model")


def tokenizer(folder: Path, template: str) -> HfTokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def prompt(folder: Path, template: str, messages: list[dict[str, Any]], form: str | None = None) -> str:
    """What the model reads, without its special tokens."""
    made = tokenizer(folder, template)
    ids = made.chat_prompt_ids(messages, [TOOL], form and FORMATS[form])
    return made.vocabulary.spell(ids).decode()


def test_a_template_that_reads_tools_gets_them_with_arguments_as_objects(folder: Path) -> None:
    text = prompt(folder, QWEN2_5, CONVERSATION)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert '<tool_call>\n{"name": "bash", "arguments": {"command": "ls <|im_end|>"}}\n</tool_call>' in text
    assert "<tool_response>\na.py <|im_end|>\n</tool_response>" in text
    assert '{"name": "bash", "parameters": {"command": "ls <|im_end|>"}}' in prompt(folder, LLAMA3, CONVERSATION)


@pytest.mark.parametrize("template", [QWEN2_5, LLAMA3, MISTRAL, GEMMA3, CHATML])
def test_no_string_of_a_client_becomes_a_special_token(folder: Path, template: str) -> None:
    """Not one in a tool's description, in arguments, or in a result."""
    made = tokenizer(folder, template)
    end = made.special_ids["<|im_end|>"]
    clean = json.loads(json.dumps([CONVERSATION, TOOL]).replace("<|im_end|>", "stop"))
    counts = [
        made.chat_prompt_ids(messages, [tool]).count(end) for messages, tool in ((CONVERSATION, TOOL), tuple(clean))
    ]
    assert counts[0] == counts[1]


def test_mistrals_template_gets_ids_in_its_own_form(folder: Path) -> None:
    text = prompt(folder, MISTRAL, CONVERSATION)
    identifier = text.partition('"call_id": "')[2][:9]
    assert f'"id": "{identifier}"' in text
    assert len(call_id("request", 0, FORMATS["mistral"])) == 9
    assert call_id("request", 0, HERMES) != call_id("request", 1, HERMES)


@pytest.mark.parametrize("template", [GEMMA3, CHATML])
@pytest.mark.parametrize("form", FORMATS)
def test_a_template_that_knows_no_tools_gets_them_as_text_in_turns(folder: Path, template: str, form: str) -> None:
    text = prompt(folder, template, CONVERSATION, form)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert FORMATS[form].render([{"name": "bash", "arguments": {"command": "ls <|im_end|>"}}]) in text
    assert "<tool_response>\na.py <|im_end|>\n</tool_response>\nAnd now?" in text


def test_a_conversation_without_tools_is_the_templates_own(folder: Path) -> None:
    made = tokenizer(folder, CHATML)
    plain = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    text = made.vocabulary.spell(made.chat_prompt_ids(plain)).decode()
    assert text == "system\na\nuser\nb\nuser\nc\nassistant\n"


@pytest.mark.parametrize(
    "arguments", ["", "{", "[1, 2", "NaN, ", '"\\ud800"', '{"a": ' * 200 + "1" + "}" * 200, "[" * 5000, "9" * 9999]
)
def test_arguments_that_are_no_json_stay_the_text_that_they_are(folder: Path, arguments: str) -> None:
    """A model that is not held to a schema may have written them, and its client sends them back."""
    call = {**CALL, "function": {"name": "bash", "arguments": arguments}}
    (message,) = template_messages([{"role": "assistant", "tool_calls": [call]}], HERMES)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert prompt(folder, QWEN2_5, [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools[0].function.parameters.properties.items().nothing() }}",
        "{{ tools[0].function.parameters + 1 }}",
        "{{ 1 // (tools | length - 1) }}",
    ],
)
def test_a_template_that_trips_over_the_tools_refuses_them(folder: Path, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        prompt(folder, template, CONVERSATION)
