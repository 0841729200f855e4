"""deploy/ray and the RayService of deploy/kubernetes: what Serve is told fits Serve and our application."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from omnidraft.hosts.ray_serve import MAX_ONGOING, MAX_QUEUED, FleetArgs, build, deployment_name

ROOT = Path(__file__).parents[2]
RAY_SERVICE = ROOT / "deploy/kubernetes/components/kuberay/service.yaml"
SETTINGS = ROOT / "deploy/kubernetes/base/settings.toml"


def serve_file(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/ray" / name).read_text())


def ray_service() -> dict[str, Any]:
    told = yaml.safe_load(next(yaml.safe_load_all(RAY_SERVICE.read_text()))["spec"]["serveConfigV2"])
    told["applications"][0]["args"]["config"] = SETTINGS  # where its volume mounts it
    return told


@pytest.fixture(params=[lambda: serve_file("serve.yaml"), ray_service], ids=["serve.yaml", "RayService"])
def fleet(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param()


@pytest.mark.parametrize("told", [serve_file("serve.yaml"), ray_service(), serve_file("serve-vllm.yaml")])
def test_serve_takes_the_file_and_knows_every_field(told: dict[str, Any]) -> None:
    """Serve itself passes over what it does not know."""
    parsed = ServeDeploySchema.model_validate(told)
    known = parsed.model_dump(exclude_unset=True)
    assert told.keys() == known.keys()
    for mine, its in zip(told["applications"], known["applications"], strict=True):
        assert mine.keys() == its.keys()
        for deployment, parsed_deployment in zip(mine.get("deployments", ()), its.get("deployments", ()), strict=True):
            assert deployment.keys() == parsed_deployment.keys()
            scaling = parsed_deployment.get("autoscaling_config") or {}
            assert deployment.get("autoscaling_config", {}).keys() <= scaling.keys()


def test_its_deployments_are_those_of_the_application(fleet: dict[str, Any]) -> None:
    (application,) = fleet["applications"]
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    built = build(FleetArgs.model_validate(application["args"]))
    made = {each.name for each in bound_deployments(built)}
    assert made == {each["name"] for each in application["deployments"]}


def bound_deployments(application: Any) -> list[Any]:
    """The ingress, and what it was given."""
    ingress = application._bound_deployment
    _, replicas = ingress.init_args
    return [ingress, *(each._bound_deployment for each in replicas.values())]


def test_the_file_says_what_the_code_would_say(fleet: dict[str, Any]) -> None:
    """So that nobody who leaves a line out gets another fleet."""
    _, replicas = fleet["applications"][0]["deployments"]
    assert replicas["max_ongoing_requests"] == MAX_ONGOING
    assert replicas["max_queued_requests"] == MAX_QUEUED


def test_threads_fit_the_processors_of_a_replica(fleet: dict[str, Any]) -> None:
    (application,) = fleet["applications"]
    _, replicas = application["deployments"]
    assert application["args"]["settings"]["decode"]["threads"] == replicas["ray_actor_options"]["num_cpus"]


def test_every_target_is_a_deployment_of_its_own(tmp_path: Path) -> None:
    settings = {"models": {"target": "qwen2.5-coder-1.5b", "more_targets": ["org/other"]}}
    ingress, *replicas = bound_deployments(build(FleetArgs(settings=settings)))
    assert [each.name for each in replicas] == ["decode-qwen2.5-coder-1.5b", "decode-other"]
    assert [each.init_args[0].models.targets for each in replicas] == [("qwen2.5-coder-1.5b",), ("org/other",)]
    assert list(ingress.init_args[1]) == ["qwen2.5-coder-1.5b", "org/other"]
    assert deployment_name(f"{tmp_path}/a b") == "decode-a-b"


def test_ray_serve_llm_builds_the_vllm_application() -> None:
    """Where vLLM and Ray Serve LLM are installed; they are not part of our environment."""
    pytest.importorskip("vllm")
    from ray.serve.llm import LLMServingArgs, build_openai_app

    (application,) = serve_file("serve-vllm.yaml")["applications"]
    (llm,) = LLMServingArgs.model_validate(application["args"]).llm_configs
    assert llm.get_engine_config().get_initialization_kwargs()["speculative_config"]["method"] == "custom_class"
    assert build_openai_app(application["args"])


def test_vllm_is_told_of_our_proposer() -> None:
    (application,) = serve_file("serve-vllm.yaml")["applications"]
    (llm,) = application["args"]["llm_configs"]
    speculative = llm["engine_kwargs"]["speculative_config"]
    assert (speculative["method"], speculative["model"]) == ("custom_class", "omnidraft.hosts.vllm.Proposer")
    target = application["runtime_env"]["env_vars"]["OMNIDRAFT_MODELS__TARGET"]
    assert target == llm["model_loading_config"]["model_source"]
