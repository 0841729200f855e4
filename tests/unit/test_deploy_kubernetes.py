"""deploy/kubernetes: every overlay builds, fits its schemas, and keeps what an operator counts on."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from omnidraft import config
from omnidraft.assembly.logs import _retention_s
from omnidraft.bus.kafka_client import _configs
from tests.deployment_secrets import value_of
from tests.kubernetes_manifests import (
    OVERLAYS,
    ROOT,
    Resource,
    built,
    custom_schemas,
    is_custom,
    labels,
    pods,
    templates,
)

RAY_PROBED = {"RayService", "RayJob"}
"""KubeRay adds the probes of Ray's own containers where they have none; these run wget in the image."""

pytestmark = [pytest.mark.long, pytest.mark.parametrize("overlay", OVERLAYS)]


def of_kind(overlay: str, *kinds: str) -> list[Resource]:
    return [each for each in built(overlay) if each["kind"] in kinds]


def containers(overlay: str) -> Iterator[tuple[Resource, dict[str, Any]]]:
    """Every container with the resource that it stands in."""
    for resource in built(overlay):
        for pod in pods(resource):
            for container in pod["containers"]:
                yield resource, container


def names(overlay: str, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in of_kind(overlay, kind)}


def matches(selector: dict[str, str], overlay: str) -> list[Resource]:
    """What makes pods with these labels."""
    return [each for each in built(overlay) if any(selector.items() <= known.items() for known in labels(each))]


def test_kubernetes_resources_fit_their_schemas(overlay: str) -> None:
    checked = [each for each in built(overlay) if not is_custom(each)]
    for resource in checked:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    assert {"Namespace", "Deployment", "Service", "ConfigMap"} <= {each["kind"] for each in checked}


def test_custom_resources_fit_the_operators_schemas(overlay: str) -> None:
    custom = [each for each in built(overlay) if is_custom(each)]
    for resource in custom:
        schema = custom_schemas()[resource["apiVersion"], resource["kind"]]
        jsonschema.Draft202012Validator(schema).validate(resource)
        with pytest.raises(jsonschema.ValidationError, match="misspelt"):
            jsonschema.Draft202012Validator(schema).validate(resource | {"spec": {**resource["spec"], "misspelt": 1}})
    assert bool(custom) == (overlay not in ("base", "overlays/cuda"))


def test_every_container_says_what_it_needs_and_is_not_root(overlay: str) -> None:
    for resource, container in containers(overlay):
        told = f"{resource['kind']} {resource['metadata']['name']}"
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), told
        assert "memory" in container["resources"]["limits"], told
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, told
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, told
    for resource in built(overlay):
        for pod in pods(resource):
            security = pod["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] > 0
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_every_container_is_probed(overlay: str) -> None:
    for resource, container in containers(overlay):
        if resource["kind"] not in RAY_PROBED:
            assert {"startupProbe", "livenessProbe"} <= container.keys(), resource["metadata"]["name"]
            ports = {each["name"] for each in container["ports"]}
            asked = [probe["httpGet"]["port"] for probe in container.values() if "httpGet" in (probe or ())]
            assert set(asked) <= ports
        elif not {"readinessProbe", "livenessProbe"} <= container.keys():
            assert re.search(r"apt-get install .*\bwget\b", (ROOT / "deploy/Dockerfile").read_text())


def test_services_and_policies_meet_pods_that_exist(overlay: str) -> None:
    for service in of_kind(overlay, "Service"):
        (workload,) = matches(service["spec"]["selector"], overlay)
        ports = {each["name"] for each in workload["spec"]["template"]["spec"]["containers"][0]["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        (workload,) = matches(budget["spec"]["selector"]["matchLabels"], overlay)
        assert workload["metadata"]["name"] == "worker"
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in names(overlay, "Deployment")
        assert scaler["spec"]["minReplicas"] >= 2


def test_pods_that_talk_to_mlflow_are_those_that_its_network_policy_admits(overlay: str) -> None:
    (mlflow,) = [each for each in of_kind(overlay, "Deployment") if each["metadata"]["name"] == "mlflow"]
    ports = {each["name"] for each in mlflow["spec"]["template"]["spec"]["containers"][0]["ports"]}
    (admitted,) = admitted_pods(overlay, labels(mlflow)[0])
    assert not ports & ports_for_all(overlay, labels(mlflow)[0])
    clients = [(each, template) for each in built(overlay) for template in templates(each) if has_login(template)]
    assert {each["metadata"]["name"] for each, _ in clients} == {"worker", "distiller", "controller"}
    for each, template in clients:
        assert admitted.items() <= template["metadata"]["labels"].items(), each["metadata"]["name"]


def test_outsiders_reach_the_ports_of_ray_that_the_operator_and_requests_need_and_no_others(overlay: str) -> None:
    for resource in of_kind(overlay, *RAY_PROBED):
        for template in templates(resource):
            pod_labels = template["metadata"]["labels"]
            assert admitted_pods(overlay, pod_labels)[0].items() <= pod_labels.items()
            ports = {port["name"] for each in template["spec"]["containers"] for port in each.get("ports", ())}
            assert ports & ports_for_all(overlay, pod_labels) == ports - {"gcs", "client"}


def has_login(template: Resource) -> bool:
    variables = [each["name"] for container in template["spec"]["containers"] for each in container.get("env", ())]
    return "MLFLOW_TRACKING_USERNAME" in variables


def ingress_rules(overlay: str, pod_labels: dict[str, str]) -> list[dict[str, Any]]:
    """Of all network policies that select a pod; together they admit what any of them does."""
    policies = [each["spec"] for each in of_kind(overlay, "NetworkPolicy")]
    selected = [each for each in policies if each["podSelector"]["matchLabels"].items() <= pod_labels.items()]
    return [rule for each in selected for rule in each["ingress"]]


def ports_for_all(overlay: str, pod_labels: dict[str, str]) -> set[str]:
    rules = ingress_rules(overlay, pod_labels)
    return {port["port"] for rule in rules if "from" not in rule for port in rule["ports"]}


def admitted_pods(overlay: str, pod_labels: dict[str, str]) -> list[dict[str, str]]:
    """Labels of pods of this namespace that reach every port."""
    rules = [rule for rule in ingress_rules(overlay, pod_labels) if "ports" not in rule]
    return [each["podSelector"]["matchLabels"] for rule in rules for each in rule["from"]]


def test_everything_that_is_mounted_is_made_here(overlay: str) -> None:
    for resource in built(overlay):
        for pod in pods(resource):
            for volume in pod["volumes"]:
                if "configMap" in volume:
                    assert volume["configMap"]["name"] in names(overlay, "ConfigMap")
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in names(overlay, "PersistentVolumeClaim")
            mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
            claims = {each["metadata"]["name"] for each in resource["spec"].get("volumeClaimTemplates", ())}
            assert mounted == {volume["name"] for volume in pod["volumes"]} | claims


def test_secrets_come_by_reference_and_none_is_made_here(overlay: str) -> None:
    assert of_kind(overlay, "Secret") == []
    for _, container in containers(overlay):
        for variable in container.get("env", ()):
            is_secret = any(word in variable["name"] for word in ("PASSWORD", "KEY", "TOKEN"))
            assert not is_secret or "secretKeyRef" in variable["valueFrom"]


def test_every_variable_of_ours_is_a_setting(overlay: str) -> None:
    """What the pod fills in is a number of processors."""
    for _, container in containers(overlay):
        variables = {each["name"]: value_of(each) for each in container.get("env", ())}
        config.load(None, {name: value for name, value in variables.items() if "__" in name})


def test_the_settings_load_and_name_services_that_are_there(overlay: str, tmp_path: Path) -> None:
    (settings_map,) = [each for each in of_kind(overlay, "ConfigMap") if "settings.toml" in each["data"]]
    file = tmp_path / "settings.toml"
    file.write_text(settings_map["data"]["settings.toml"])
    settings = config.load(file, {})
    assert settings.registry.url == "http://mlflow:5000"
    assert "mlflow" in names(overlay, "Service")
    topics = {each["metadata"]["name"]: each["spec"] for each in of_kind(overlay, "KafkaTopic")}
    if topics:
        log = settings.log
        assert topics.keys() == {log.traces_topic, log.dead_letters_topic, log.control_topic}
        assert topics[log.traces_topic]["partitions"] == log.partitions
        assert topics[log.dead_letters_topic]["partitions"] == topics[log.control_topic]["partitions"] == 1
        for topic, spec in topics.items():
            is_compacted = topic == log.control_topic
            ours = _configs(_retention_s(log, topic), is_compacted)  # what we would create it with
            assert {name: str(value) for name, value in spec["config"].items()} == ours, topic
        (kafka,) = of_kind(overlay, "Kafka")
        assert log.url == f"kafka://{kafka['metadata']['name']}-kafka-bootstrap:9093"


def test_every_image_is_ours_or_of_a_fixed_version(overlay: str) -> None:
    tag = "cuda" if overlay.endswith("cuda") else "cpu"
    images = {container["image"].partition("@")[0] for _, container in containers(overlay)}
    assert images <= {f"registry.example.com/omnidraft:{tag}", "postgres:17"}


def service_of(resource: Resource) -> str | None:
    """The service of ours that runs in it; None: another's."""
    name = str(resource["metadata"]["name"])
    return name if name in ("worker", "distiller", "controller") else None


def test_every_service_has_its_own_login_at_kafka_and_one_at_mlflow(overlay: str) -> None:
    ours = [(service_of(resource), container) for resource, container in containers(overlay) if service_of(resource)]
    assert {service for service, _ in ours} == {"worker", "distiller", "controller"}
    for service, container in ours:
        variables = {each["name"]: each.get("value") or each["valueFrom"] for each in container["env"]}
        kafka = {name.partition("KAFKA__")[2]: value for name, value in variables.items() if "KAFKA__" in name}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert kafka["SECURITY"] == "sasl_ssl"
        assert kafka["CA_FILE"].rpartition("/")[0] in mounts
        assert kafka["USERNAME"] == f"omnidraft-{service}"
        assert kafka["PASSWORD"]["secretKeyRef"] == {"name": kafka["USERNAME"], "key": "password"}
        for part in ("username", "password"):
            reference = variables[f"MLFLOW_TRACKING_{part.upper()}"]["secretKeyRef"]
            assert reference == {"name": "mlflow-login", "key": part}
        keys = {name: value["secretKeyRef"] for name, value in variables.items() if "REGISTRY__" in name}
        assert keys.pop("OMNIDRAFT_REGISTRY__TRUSTED_KEYS") == {"name": "signing-keys", "key": "trusted"}
        private = {"OMNIDRAFT_REGISTRY__PRIVATE_KEY": {"name": "signing-keys", "key": service}}
        assert keys == ({} if service == "worker" else private)


def test_mlflow_has_a_login(overlay: str) -> None:
    (container,) = [each for resource, each in containers(overlay) if resource["metadata"]["name"] == "mlflow"]
    assert "--app-name=basic-auth" in container["command"]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["MLFLOW_AUTH_ADMIN_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "mlflow-login"
    (logins,) = [each for each in of_kind(overlay, "ConfigMap") if "basic_auth.ini" in each["data"]]
    assert logins["data"]["basic_auth.ini"] == (ROOT / "deploy/mlflow/basic_auth.ini").read_text()


def test_strimzi_lets_nobody_in_but_our_users_with_their_rights(overlay: str) -> None:
    for kafka in of_kind(overlay, "Kafka"):
        for listener in kafka["spec"]["kafka"]["listeners"]:
            assert listener["tls"] is True
            assert listener["authentication"] == {"type": "scram-sha-512"}
        assert kafka["spec"]["kafka"]["authorization"] == {"type": "simple"}
        assert "userOperator" in kafka["spec"]["entityOperator"]
        granted = {user["metadata"]["name"]: rights_of(user) for user in of_kind(overlay, "KafkaUser")}
        assert granted == tomllib.loads((ROOT / "deploy/kafka/rights.toml").read_text())


def rights_of(user: Resource) -> dict[str, list[str]]:
    """Topic to operations."""
    assert user["spec"]["authentication"] == {"type": "scram-sha-512"}
    rules = user["spec"]["authorization"]["acls"]
    assert {rule["resource"]["type"] for rule in rules} == {"topic"}
    assert not any("host" in rule or rule.get("type", "allow") != "allow" for rule in rules)
    return {rule["resource"]["name"]: rule["operations"] for rule in rules}
