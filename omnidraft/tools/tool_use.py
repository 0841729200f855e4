"""The tools that a request offers, and what the answer has to do with them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from omnidraft.errors import RequestError

MAX_TOOLS = 1024
"""The most tools that one request may offer; three servers of MCP bring more than OpenAI's 128."""
MAX_CALLS = 32
"""The most calls that one answer may have."""
NAME_PATTERN = r"^[a-zA-Z0-9_.:/-]{1,128}$"
"""As wide as Anthropic's and those of MCP."""

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of its arguments; None: any object."""
    is_strict: bool = False
    """Whether arguments always match the schema."""

    def definition(self) -> dict[str, Any]:
        """Return the tool as chat templates read it: OpenAI's shape."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters or _NO_PARAMETERS}}


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. Raises RequestError, naming the field, for tools that cannot be offered together."""

    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    """`auto`: the model answers or calls; `none`: it answers; `required`: it calls."""
    named: str | None = None
    """The only tool that may be called, and that is called."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if not 1 <= len(names) <= MAX_TOOLS:
            raise RequestError(f"tools: between 1 and {MAX_TOOLS} are offered, got {len(names)}")
        for index, tool in enumerate(self.tools):
            _check(f"tools.{index}.function", tool)
            if tool.name in names[:index]:
                raise RequestError(f"tools.{index}.function.name: {tool.name!r} is the name of another tool, too")
        if self.named is not None and self.named not in names:
            raise RequestError(f"tool_choice: no tool {self.named!r} here; there are {', '.join(map(repr, names))}")

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.named is not None:
            return tuple(tool for tool in self.tools if tool.name == self.named)
        return () if self.choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.named is not None or self.choice == "required"

    def definitions(self) -> list[dict[str, Any]]:
        """Return all tools as chat templates read them."""
        return [tool.definition() for tool in self.tools]


def tool_use(
    definitions: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None = None,
    *,
    is_parallel: bool = True,
) -> ToolUse:
    """Return what OpenAI's `tools` and `tool_choice` say. Raises RequestError, naming the field."""
    tools = tuple(_tool(f"tools.{index}", given) for index, given in enumerate(definitions))
    match choice:
        case None:
            return ToolUse(tools, is_parallel=is_parallel)
        case "auto" | "none" | "required":
            return ToolUse(tools, choice, is_parallel=is_parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolUse(tools, named=name, is_parallel=False)
    raise RequestError(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}, '
        f"got {choice!r}"
    )


def _tool(field: str, given: Mapping[str, Any]) -> Tool:
    match given:
        case {"type": "function", "function": {"name": str(name)}}:
            function: Mapping[str, Any] = given["function"]
            return Tool(name, function.get("description"), function.get("parameters"), bool(function.get("strict")))
    raise RequestError(f'{field} must be {{"type": "function", "function": {{"name": ...}}}}')


def _check(field: str, tool: Tool) -> None:
    if not re.fullmatch(NAME_PATTERN, tool.name):
        raise RequestError(f"{field}.name must match {NAME_PATTERN}, got {tool.name[:80]!r}")
    if not isinstance(tool.description, str | None):
        raise RequestError(f"{field}.description must be a text")
    if not isinstance(tool.parameters, Mapping | None):
        raise RequestError(f"{field}.parameters must be a JSON schema")
    named = (tool.parameters or {}).get("type") or "object"
    if "object" not in ([named] if isinstance(named, str) else named):
        raise RequestError(f"{field}.parameters.type must be 'object', got {named!r}")
