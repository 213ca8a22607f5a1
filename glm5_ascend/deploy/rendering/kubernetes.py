"""Kubernetes: a Deployment for roles of one machine, a LeaderWorkerSet for others; scripts in a ConfigMap.

Router and proxy are in `kubernetes_front`, the pods in `pod`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.command import heading
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering import image, kubernetes_front, monitoring, scripts
from glm5_ascend.deploy.rendering.check_scripts import CHECKS, HEALTH
from glm5_ascend.deploy.rendering.kubernetes_front import ANSWERS, INSTANCE, PART_OF, full_name, service_name
from glm5_ascend.deploy.rendering.pod import pod
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import dumped, manifest
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
    script = {scripts.script_name(role): scripts.script(profile, role, model)}
    return manifest(
        "v1", "ConfigMap", full_name(profile, role), data={**script, "health.sh": HEALTH, "checks.sh": CHECKS}
    )


def workload(profile: Profile, role: Role, model: str, values: PodValues = DEFAULTS) -> dict[str, Any]:
    name = full_name(profile, role)
    # The NPUs of a machine hold one server: the old one ends first, one machine or group at a time.
    rolling = {"maxSurge": 0, "maxUnavailable": 1}
    spec: dict[str, Any] = {"replicas": values.replicas}
    if role.nodes == 1:
        spec |= {
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
            "progressDeadlineSeconds": values.life.start_minutes * 60 + 600,
            "selector": {"matchLabels": {INSTANCE: name}},
            "template": pod(profile, role, model, values, leader=True),
        }
        return manifest("apps/v1", "Deployment", name, spec=spec)
    spec |= {
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": {
            "size": role.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",  # ranks cannot reconnect
            "leaderTemplate": pod(profile, role, model, values, leader=True),
            "workerTemplate": pod(profile, role, model, values, leader=role.per_rank),
        },
    }
    return manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, spec=spec)


def disruption(profile: Profile, role: Role) -> dict[str, Any]:
    """Node drains evict one pod at a time; a pod that is not ready does not block them."""
    name = full_name(profile, role)
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {INSTANCE: name}},
    }
    return manifest("policy/v1", "PodDisruptionBudget", name, spec=spec)


def pod_group(profile: Profile, role: Role, replicas: int) -> dict[str, Any]:
    members = {"minMember": role.nodes * max(1, replicas)}
    return manifest("scheduling.volcano.sh/v1beta1", "PodGroup", full_name(profile, role), spec=members)


def network_policy(profile: Profile, values: PodValues) -> dict[str, Any]:
    """Peers that may reach the pods. It does not apply to pods on the host's network: the key protects them."""
    peers = [{"podSelector": {}}] if values.auth.allow_from is None else values.auth.allow_from
    spec = {
        "podSelector": {"matchLabels": {PART_OF: profile.name}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers}] if peers else [],
    }
    return manifest("networking.k8s.io/v1", "NetworkPolicy", profile.name, spec=spec)


def service(profile: Profile, role: Role) -> dict[str, Any]:
    count = role.local_ranks if role.per_rank else 1
    ports = [{"name": f"http-{i}", "port": role.port + i, "targetPort": role.port + i} for i in range(count)]
    if scripts.uses_store(role) and role is profile.roles["prefill"]:  # decode connects to both on prefill
        handshake = int(role.args["disaggregation-bootstrap-port"])
        ports += [{"name": n, "port": p, "targetPort": p} for n, p in (("store", STORE_PORT), ("handshake", handshake))]
    selector = {INSTANCE: full_name(profile, role), ANSWERS: "yes"}
    return manifest("v1", "Service", service_name(profile, role), spec={"selector": selector, "ports": ports})
