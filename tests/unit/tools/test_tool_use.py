"""Tools that cannot be offered are refused by the name of their field."""

from typing import Any

import pytest

from omnidraft.errors import RequestError
from omnidraft.tools.tool_use import MAX_TOOLS, tool_use


def tool(name: str = "look", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_a_named_tool_is_the_only_one_that_can_be_called() -> None:
    use = tool_use([tool("a"), tool("b")], {"type": "function", "function": {"name": "b"}})
    assert [each.name for each in use.callable_tools] == ["b"]
    assert use.must_call
    assert [each["function"]["name"] for each in use.definitions()] == ["a", "b"]
    assert tool_use([tool()], "none").callable_tools == ()
    assert not tool_use([tool()]).must_call


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], None, "tools: between 1 and 1024"),
        ([tool(f"t{n}") for n in range(MAX_TOOLS + 1)], None, "tools: between 1 and 1024 are offered, got 1025"),
        ([tool("a"), tool("a")], None, r"tools\.1\.function\.name: 'a' is the name of another tool"),
        ([tool("a b")], None, r"tools\.0\.function\.name must match"),
        ([tool("x" * 129)], None, r"tools\.0\.function\.name must match"),
        ([{"type": "custom", "custom": {}}], None, r"tools\.0 must be"),
        ([tool(parameters=[])], None, r"tools\.0\.function\.parameters must be a JSON schema"),
        ([tool(parameters={"type": "array"})], None, r"parameters\.type must be 'object', got 'array'"),
        ([tool(description=3)], None, r"description must be a text"),
        (
            [tool("a"), tool("b")],
            {"type": "function", "function": {"name": "c"}},
            "no tool 'c' here; there are 'a', 'b'",
        ),
        ([tool()], "always", "tool_choice must be"),
        ([tool()], {"type": "function"}, "tool_choice must be"),
    ],
)
def test_a_refusal_names_its_field(tools: list[dict[str, Any]], choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tool_use(tools, choice)
