"""What kustomize makes of deploy/kubernetes, and the schemas of custom resources, for tests.

OMNIDRAFT_CRDS names a folder with the operators' CustomResourceDefinitions as YAML files (KubeRay: ray.io_*.yaml of its
config/crd/bases; Strimzi: *-Crd-*.yaml of its install files). Without it custom resources are checked for what we
promise of them, but not against the operators' schemas. OMNIDRAFT_REQUIRE_CRDS=1 turns that skip into a failure.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ["base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir())]
CUSTOM_GROUPS = ("ray.io", "kafka.strimzi.io")

Resource = dict[str, Any]


@cache
def built(overlay: str) -> tuple[Resource, ...]:
    """The resources of an overlay. Skips without kustomize."""
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if kubectl is None and kustomize is None:
        pytest.skip("neither kubectl nor kustomize is on the path")
    command = [kustomize, "build"] if kustomize else [kubectl, "kustomize"]
    done = subprocess.run([*command, KUBERNETES / overlay], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def is_custom(resource: Resource) -> bool:
    """Whether an operator defines it."""
    return resource["apiVersion"].partition("/")[0] in CUSTOM_GROUPS


def pods(resource: Resource) -> list[Resource]:
    """The pod specifications in it, those of Ray clusters too."""
    return list(_pods(resource["spec"])) if "spec" in resource else []


def _pods(part: Any) -> Iterator[Resource]:
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        else:
            for each in part.values():
                yield from _pods(each)
    elif isinstance(part, list):
        for each in part:
            yield from _pods(each)


def labels(resource: Resource) -> list[dict[str, str]]:
    """Of the pods that it makes."""
    return [each.get("metadata", {}).get("labels", {}) for each in templates(resource)]


def templates(resource: Resource) -> list[Resource]:
    """The templates of the pods that it makes, those of Ray clusters too."""
    return list(_templates(resource.get("spec")))


def _templates(part: Any) -> Iterator[Resource]:
    if isinstance(part, dict):
        if "spec" in part.get("template", {}):  # Strimzi's have none
            yield part["template"]
        for each in part.values():
            yield from _templates(each)
    elif isinstance(part, list):
        for each in part:
            yield from _templates(each)


@cache
def custom_schemas() -> Mapping[tuple[str, str], Resource]:
    """(apiVersion, kind) -> schema that knows every field. Skips without OMNIDRAFT_CRDS."""
    folder = os.environ.get("OMNIDRAFT_CRDS")
    if folder is None:
        why = "OMNIDRAFT_CRDS names no folder with the operators' CRDs"
        if os.environ.get("OMNIDRAFT_REQUIRE_CRDS") == "1":
            pytest.fail(why)
        pytest.skip(why)
    found: dict[tuple[str, str], Resource] = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        definition = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        spec = definition["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            found[key] = _strict(version["schema"]["openAPIV3Schema"])
    return found


def _strict(schema: Any) -> Any:
    """As JSON Schema that refuses unknown fields, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {name: _strict(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
