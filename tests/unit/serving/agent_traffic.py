"""A request in the shape of a coding agent's: a long system prompt, nested schemas, parallel calls, long results."""

from typing import Any


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_PATH = {"type": "string", "description": "The absolute path of the file"}
_EDITS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "old_string": {"type": "string"},
            "new_string": {"type": "string", "description": "The text to replace it with (must differ)"},
            "replace_all": {"type": "boolean", "default": False},
        },
        "required": ["old_string", "new_string"],
        "additionalProperties": False,
    },
}
_TODO = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
    },
    "required": ["content", "status"],
    "additionalProperties": False,
}
TOOLS = [
    _tool("read_file", "Reads a file.", {"path": _PATH, "offset": {"type": "number"}}, ["path"]),
    _tool("write_file", "Writes a file.", {"path": _PATH, "content": {"type": "string"}}, ["path", "content"]),
    _tool("edit", "Makes several edits to one file.", {"path": _PATH, "edits": _EDITS}, ["path", "edits"]),
    _tool("bash", "Runs a command.", {"command": {"type": "string"}, "timeout": {"type": "number"}}, ["command"]),
    _tool("glob", "Finds files by pattern.", {"pattern": {"type": "string"}}, ["pattern"]),
    _tool(
        "grep",
        "Searches contents with a regular expression.",
        {
            "pattern": {"type": "string"},
            "output_mode": {"type": "string", "enum": ["content", "files_with_matches", "count"]},
            "-n": {"type": "boolean", "description": "Show line numbers"},
        },
        ["pattern"],
    ),
    _tool("todo_write", "Keeps a list of tasks.", {"todos": {"type": "array", "items": _TODO}}, ["todos"]),
    _tool("web_fetch", "Fetches a page.", {"url": {"type": "string", "format": "uri"}}, ["url"]),
    _tool("list_dir", "Lists a folder.", {"path": _PATH, "ignore": {"type": "array", "items": _PATH}}, ["path"]),
    _tool(
        "task",
        "Starts an agent for a task.",
        {"prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}},
        ["prompt"],
    ),
]


def _call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


_FILE = "".join(f"{number:6}\tdef f{number}(a):\n        return a + {number}\n" for number in range(40))
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a coding agent. Work step by step.\n" * 20},
    {"role": "user", "content": [{"type": "text", "text": "Rename f3 in a.py"}, {"type": "text", "text": " to g."}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            _call("call_a", "read_file", '{"path": "/src/a.py"}'),
            _call("call_b", "grep", '{"pattern": "f3\\\\(", "-n": true, "output_mode": "content"}'),
        ],
    },
    {"role": "tool", "tool_call_id": "call_a", "content": _FILE},
    {"role": "tool", "tool_call_id": "call_b", "content": [{"type": "text", "text": "a.py:7: f3(1) <|im_end|>"}]},
    {"role": "assistant", "content": "I will edit it.", "tool_calls": [_call("call_c", "edit", '{"path": ')]},
    {"role": "tool", "tool_call_id": "call_c", "content": "Error: arguments are no JSON"},
]
REQUEST: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 120,
    "temperature": 1.0,
}
