"""Kubernetes: a Deployment for roles of one machine, a LeaderWorkerSet for others; scripts in a ConfigMap.

Router and proxy are in `kubernetes_front`, the pods in `pod`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.profiles.show import heading
from glm5_ascend.deploy.rendering import image, kubernetes_front, monitoring, scripts
from glm5_ascend.deploy.rendering.check_scripts import CHECKS, HEALTH
from glm5_ascend.deploy.rendering.kubernetes_front import ANSWERS, INSTANCE, PART_OF, full_name, service_name
from glm5_ascend.deploy.rendering.pod import pod
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import dumped
from glm5_ascend.errors import ConfigError

#: Port of SGLang's memory store: ASCEND_MF_STORE_URL of its profiles.
STORE_PORT = 24667
DEFAULTS = PodValues()


def files(profile: Profile, model: str, values: PodValues = DEFAULTS) -> dict[str, str]:
    texts = {file: document(profile, objects) for file, objects in grouped(profile, model, values).items()}
    return texts | dockerfiles(profile) | scripts.front(profile)


def dockerfiles(profile: Profile) -> dict[str, str]:
    """Dockerfiles of the servers' images, and of the router; the proxy runs in the servers' image."""
    texts = dict(image.dockerfile(profile, role) for role in profile.roles.values())
    return texts if profile.proxy else {**texts, "Dockerfile.router": kubernetes_front.DOCKERFILE}


def grouped(profile: Profile, model: str, values: PodValues) -> dict[str, list[dict[str, Any]]]:
    """File name -> its objects. Raises `ConfigError` for replicas of prefill and decode apart."""
    if profile.proxy and values.replicas > 1:  # a second group would get no requests
        raise ConfigError("replicas: the proxy of PD knows the pods of one group", "render again for another namespace")
    groups = {
        f"{role.name}.yaml": [
            config_map(profile, role, model),
            workload(profile, role, model, values),
            service(profile, role),
            disruption(profile, role),
            *([pod_group(profile, role, values.replicas)] if values.scheduling.pod_group else []),
        ]
        for role in profile.roles.values()
    }
    file, objects = kubernetes_front.objects(profile, values)
    groups[file] = objects
    groups["network.yaml"] = [network_policy(profile, values)]
    if values.monitoring.enabled:
        groups["monitoring.yaml"] = monitoring.objects(profile, values)
    for item in [item for objects in groups.values() for item in objects]:
        # The label by which `kubectl get` and `delete` select all objects of a profile.
        item["metadata"]["labels"] = {PART_OF: profile.name} | item["metadata"].get("labels", {})
        if values.namespace:
            item["metadata"]["namespace"] = values.namespace
            for subject in item.get("subjects", []):
                subject["namespace"] = values.namespace
    return groups


def document(profile: Profile, objects: list[dict[str, Any]]) -> str:
    return "\n".join([*heading(profile), dumped(objects)])


def config_map(profile: Profile, role: Role, model: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": full_name(profile, role)},
        "data": {
            scripts.script_name(role): scripts.script(profile, role, model),
            "health.sh": HEALTH,
            "checks.sh": CHECKS,
        },
    }


def workload(profile: Profile, role: Role, model: str, values: PodValues = DEFAULTS) -> dict[str, Any]:
    name = full_name(profile, role)
    if role.nodes == 1:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": values.replicas,
                # The NPUs of a machine hold one server: the old one ends first, one machine at a time.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
                "progressDeadlineSeconds": values.life.start_minutes * 60 + 600,
                "selector": {"matchLabels": {INSTANCE: name}},
                "template": pod(profile, role, model, values, leader=True),
            },
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": values.replicas,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "leaderWorkerTemplate": {
                "size": role.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",  # ranks cannot reconnect
                "leaderTemplate": pod(profile, role, model, values, leader=True),
                "workerTemplate": pod(profile, role, model, values, leader=role.per_rank),
            },
        },
    }


def disruption(profile: Profile, role: Role) -> dict[str, Any]:
    """Node drains evict one pod at a time; a pod that is not ready does not block them."""
    name = full_name(profile, role)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {INSTANCE: name}},
        },
    }


def pod_group(profile: Profile, role: Role, replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": full_name(profile, role)},
        "spec": {"minMember": role.nodes * max(1, replicas)},
    }


def network_policy(profile: Profile, values: PodValues) -> dict[str, Any]:
    """Peers that may reach the pods. It does not apply to pods on the host's network: the key protects them."""
    peers = [{"podSelector": {}}] if values.auth.allow_from is None else values.auth.allow_from
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": profile.name},
        "spec": {
            "podSelector": {"matchLabels": {PART_OF: profile.name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": peers}] if peers else [],
        },
    }


def service(profile: Profile, role: Role) -> dict[str, Any]:
    count = role.local_ranks if role.per_rank else 1
    ports = [{"name": f"http-{i}", "port": role.port + i, "targetPort": role.port + i} for i in range(count)]
    if scripts.uses_store(role) and role is profile.roles["prefill"]:  # decode connects to both on prefill
        handshake = int(role.args["disaggregation-bootstrap-port"])
        ports += [{"name": n, "port": p, "targetPort": p} for n, p in (("store", STORE_PORT), ("handshake", handshake))]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service_name(profile, role), "labels": {PART_OF: profile.name}},
        "spec": {
            "selector": {INSTANCE: full_name(profile, role), ANSWERS: "yes"},
            "ports": ports,
        },
    }
