"""Grammars that nobody should ask for: each is refused, or works."""

import json
from typing import Any

INTEGER: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}


def chained_refs(num: int) -> dict[str, Any]:
    """A definition that refers to the next one, and so on."""
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(num)}
    return {"$defs": links | {f"a{num}": INTEGER}, "$ref": "#/$defs/a0", "title": "x" * max(0, 113_000 - 34 * num)}


def properties(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": INTEGER for i in range(num)}}


def nested(depth: int, *, keyword: str = "items") -> dict[str, Any]:
    schema = INTEGER
    for _ in range(depth):
        inner = {"a": schema} if keyword == "properties" else schema
        schema = {"type": "object" if keyword == "properties" else "array", keyword: inner}
    return schema


def alternatives(width: int, depth: int) -> dict[str, Any]:
    schema = INTEGER
    for _ in range(depth):
        schema = {"anyOf": [schema] * width}
    return schema


def of_one_key(num: int) -> list[dict[str, Any]]:
    return [{"type": "object", "properties": {f"k{i}": TEXT}, "required": [f"k{i}"]} for i in range(num)]


SCHEMAS: dict[str, dict[str, Any]] = {
    "3,500 chained references": chained_refs(3500),
    "30,000 properties": properties(30_000),
    "12,000 properties": properties(12_000),
    "900 properties": properties(900),
    "450 chained references, in few bytes": chained_refs(450) | {"title": ""},
    "deep objects": nested(30, keyword="properties"),
    "deeper objects": nested(400, keyword="properties"),
    "deep arrays": nested(450),
    "a wide enum": {"enum": [f"value {i}" for i in range(3000)]},
    "a wider enum": {"enum": [f"value {i}" for i in range(19_000)]},
    "a long enum": {"enum": ["x" * 60_000]},
    "a huge pattern": TEXT | {"pattern": "^" + "|".join(f"w{i}x{i * 7}" for i in range(5000)) + "$"},
    "a repeated pattern": TEXT | {"pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "an exponential pattern": TEXT | {"pattern": "^(a|b)*a(a|b){25}$"},
    "many items": {"type": "array", "minItems": 10**9},
    "exactly many items": {"type": "array", "minItems": 10_000, "maxItems": 10_000, "items": INTEGER},
    "long texts": TEXT | {"minLength": 10**9},
    "longer texts": TEXT | {"minLength": 10**100},
    "many more properties": {"type": "object", "minProperties": 10**6},
    "huge bounds": INTEGER | {"minimum": -(10**400), "maximum": 10**400},
    "a large divisor": INTEGER | {"multipleOf": 10**9 + 7},
    "a small divisor": {"type": "number", "multipleOf": 1e-300},
    "alternatives of alternatives": alternatives(7, 4),
    "exploding alternatives": alternatives(8, 5),
    "alternative objects": {"anyOf": of_one_key(400)},
    "joint objects": {"allOf": of_one_key(400)},
    "products of objects": {"allOf": [{"anyOf": of_one_key(3)} for _ in range(12)]},
    "slow pattern properties": {"type": "object", "patternProperties": {f"^a{i}[a-z]*$": INTEGER for i in range(900)}},
    "a reference to a web page": {"$ref": "http://127.0.0.1:9/x.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a circle with more": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "itself twice": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "a tree of itself": {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}},
    "options of the compiler": {"type": "object", "x-guidance": {"whitespace_pattern": "(a|b){1,50000}"}},
    "wrong options of the compiler": {"type": "object", "x-guidance": {"lenient": 7, "none": []}},
    "no type": {"type": [], "properties": 7, "items": None, "$defs": [], "required": "x"},
    "contradiction": {"type": "string", "enum": [1, 2], "const": 3},
}

REGEXES = {
    "a long repetition": "[a-z]{1,100000}",
    "repetitions of repetitions": "((a{1,1000}){1,1000}){1,1000}",
    "dots": "(.{0,1000}){0,1000}",
    "deep groups": "(" * 5000 + "a" + ")" * 5000,
    "deep stars": "(" * 200 + "a" + "*)" * 200,
    "many words": "|".join(f"w{i}" for i in range(9000)),
    "more words": "|".join(f"w{i}" for i in range(50_000)),
    "an exponential automaton": "(a|b)*a(a|b){25}",
    "unicode classes": r"\p{L}{1,1000}",
    "any case": "(?i)" + "hello world " * 4000,
    "wildcards": ".*" * 1000,
    "options": "a?" * 20_000,
    "nothing": "",
    "no text": "[^\\x00-\\x{10FFFF}]",
    "a backreference": r"(a)\1",
    "zero bytes": "\x00" * 1000,
}


def bodies() -> dict[str, bytes]:
    """Every grammar in each way to ask for it."""
    made: dict[str, dict[str, Any]] = {}
    for name, schema in SCHEMAS.items():
        wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
        made[name] = {"response_format": wrapped}
    for name, schema in list(SCHEMAS.items())[4:8]:
        made[f"{name}, as vLLM has it"] = {"structured_outputs": {"json": schema}}
    for name, regex in REGEXES.items():
        made[name] = {"structured_outputs": {"regex": regex}}
    asked = {"prompt": "clips", "max_tokens": 4, "seed": 1}
    return {name: json.dumps(asked | fields).encode() for name, fields in made.items()}
