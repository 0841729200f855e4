"""A chat template says how its model writes calls, and whether it reads tools."""

from typing import get_args

import pytest

from omnidraft.config.sections import ToolFormat
from omnidraft.tools.formats import FORMATS, detect, knows_tools
from tests.unit.tools.templates import CHATML, GEMMA3, LLAMA3, MISTRAL, QWEN2_5


@pytest.mark.parametrize(
    ("template", "name", "knows"),
    [
        (QWEN2_5, "hermes", True),
        (LLAMA3, "llama3", True),
        (MISTRAL, "mistral", True),
        (GEMMA3, "hermes", False),
        ("{{ '<function=' ~ tools }}", "qwen3_coder", True),
        ("{{ '[TOOL_CALLS]' ~ tools ~ '[ARGS]' }}", "mistral_args", True),
        ("{{ '<|tool_calls_section_begin|><|tool_call_argument_begin|>' }}", "kimi", False),
        ("{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}", "deepseek_v31", False),
        ("{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>```json' }}", "deepseek_v3", False),
        (CHATML, "hermes", False),
        ("", "hermes", False),
        ("{% broken", "hermes", False),
        ("{{ 'we have no tools here' }}", "hermes", False),
        (
            "{% for m in messages %}{% generation %}{{ tools }}{% endgeneration %}{% break %}{% endfor %}",
            "hermes",
            True,
        ),
    ],
)
def test_the_format_of_a_template(template: str, name: str, knows: bool) -> None:
    assert detect(template).name == name
    assert knows_tools(template) is knows


def test_settings_know_every_format() -> None:
    assert set(get_args(ToolFormat)) == set(FORMATS) == {form.name for form in FORMATS.values()}
