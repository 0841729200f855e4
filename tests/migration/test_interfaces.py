"""What users type, scrape, send and name in their own files is still there: commands, metrics, HTTP, import paths."""

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from omnidraft import config, wiring
from omnidraft.cli import app
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metric_definitions import DEFINITIONS
from omnidraft.telemetry.metrics import CountingMetrics
from tests.migration.earlier_release import expected

WITHDRAWN = {"pipelines.scaling": frozenset({"--simulate", "--no-simulate"})}
"""Options that a pipeline has no more."""
DEPLOYED = {
    "omnidraft.hosts.ray_serve": "build",
    "omnidraft.hosts.vllm": "Proposer",
    "omnidraft.traces.redaction": "hashed_tenant",
    "omnidraft.cli": "entry",
}
"""Module -> a name in it that deployments give: in Ray's and vLLM's settings, in ours, as the program."""


def options(command: click.Command, path: str) -> Iterator[tuple[str, set[str], list[str | None]]]:
    """Yield each command with its options and the names of its arguments."""
    by_kind = {
        kind: [each for each in command.params if each.param_type_name == kind] for kind in ("option", "argument")
    }
    names = {name for each in by_kind["option"] for name in (*each.opts, *each.secondary_opts)}
    yield path, names, [each.name for each in by_kind["argument"]]
    for name, child in getattr(command, "commands", {}).items():
        yield from options(child, f"{path} {name}")


def pipeline_command(name: str) -> click.Command:
    """Return what `python -m` of this module runs."""
    module = f"{name}.__main__" if find_spec(name).submodule_search_locations else name  # type: ignore[union-attr]
    made = typer.Typer()
    made.command()(importlib.import_module(module).main)
    return typer.main.get_command(made)


def test_every_command_has_the_options_it_had() -> None:
    now = {path: (names, arguments) for path, names, arguments in options(typer.main.get_command(app), "omnidraft")}
    for path, then in expected("commands.json").items():
        if path.startswith("omnidraft"):
            names, arguments = now[path]
            assert names >= set(then["options"]), path
            assert arguments == then["arguments"], path


@pytest.mark.parametrize("name", [name for name in expected("commands.json") if name.startswith("pipelines.")])
def test_every_pipeline_has_the_options_it_had(name: str) -> None:
    then = expected("commands.json")[name]
    ((_, names, arguments),) = options(pipeline_command(name), name)
    assert names >= set(then["options"]) - WITHDRAWN.get(name, frozenset())
    assert arguments == then["arguments"]


def test_every_metric_has_the_kind_labels_and_buckets_it_had() -> None:
    for name, then in expected("metrics.json").items():
        now = DEFINITIONS[name]
        assert (now.kind, list(now.labels)) == (then["kind"], then["labels"]), name
        assert then["buckets"] in (None, list(now.buckets)), name
        for label, values in then["values"].items():
            assert set(now.values[label]) >= set(values), (name, label)


@pytest.fixture
def document(deployment: config.Settings) -> Iterator[dict[str, Any]]:
    """The OpenAPI document of a worker."""
    metrics = CountingMetrics()
    worker = wiring.engine(deployment, metrics)
    requests = RequestQueue(metrics, max_waiting=2)
    served = [ServedModel(worker.engine, "print")]
    yield application(requests, served, config.WorkerSettings(), lambda: b"").openapi()
    requests.close(10)


def resolved(node: Any, document: dict[str, Any]) -> Any:
    """Return the schema with its references followed, and its alternatives in one form."""
    if isinstance(node, dict) and "$ref" in node:
        return resolved(document["components"]["schemas"][node["$ref"].rsplit("/", 1)[1]], document)
    if isinstance(node, dict):
        return with_flat_alternatives({name: resolved(value, document) for name, value in node.items()})
    return [resolved(value, document) for value in node] if isinstance(node, list) else node


def with_flat_alternatives(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `anyOf` for `oneOf`: ours exclude each other. Nested ones are flat."""
    ways = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(ways, list):
        return schema
    flat = [inner for way in ways for inner in (way["anyOf"] if set(way) == {"anyOf"} else [way])]
    return {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")} | {"anyOf": flat}


def is_held(now: Any, then: Any, where: str) -> bool:
    try:
        holds(now, then, where)
    except AssertionError:
        return False
    return True


def holds(now: Any, then: Any, where: str) -> None:
    """Fail unless everything in the old document stands in the new one; more may stand there."""
    if isinstance(then, dict) and "type" in then and "anyOf" in now:  # null beside it, for those who offer tools
        rest = {name: value for name, value in now.items() if name != "anyOf"}
        assert any(is_held(rest | new, then, where) for new in now["anyOf"]), where
    elif isinstance(then, dict):
        for name, value in then.items():
            assert name in now, f"{where}/{name}"
            holds(now[name], value, f"{where}/{name}")
    elif isinstance(then, list) and where.endswith("/required") and "/requestBody/" in where:
        assert set(now) <= set(then), where  # of a client that writes as then, nothing more may be asked
    elif isinstance(then, list) and not any(isinstance(each, dict) for each in then):
        assert set(now) >= set(then), where
    elif where.endswith("/anyOf"):
        for old in (each for each in then if each.get("maxItems") != 0):  # `tools` took an empty list alone
            assert any(is_held(new, old, where) for new in now), f"{where}: {old}"
    elif where.endswith("/minimum") and "/requestBody/" in where:
        assert now <= then, where  # what was taken then is taken
    elif where.endswith("/text/event-stream/schema/type"):
        assert now == "object", where  # each event is described, where the whole stream was; its bytes are the same
    elif isinstance(then, list):
        assert len(now) >= len(then), where
        for number, (new, old) in enumerate(zip(now, then, strict=False)):
            holds(new, old, f"{where}/{number}")
    else:
        assert now == then, where


def test_every_field_of_every_request_and_response_is_still_there(document: dict[str, Any]) -> None:
    then = expected("openapi.json")
    holds(resolved(document["paths"], document), resolved(then["paths"], then), "")


def test_no_field_became_required(document: dict[str, Any]) -> None:
    then = expected("openapi.json")
    for path, operations in then["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                body = [
                    resolved(each["paths"][path][method]["requestBody"], each)["content"]["application/json"]["schema"]
                    for each in (document, then)
                ]
                assert set(body[0].get("required", ())) <= set(body[1].get("required", ()))


@pytest.mark.parametrize("module", DEPLOYED)
def test_what_deployments_name_is_defined_where_they_name_it(module: str) -> None:
    """Read, not imported: vLLM is not installed here."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    names = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert DEPLOYED[module] in names
