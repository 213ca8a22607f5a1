"""Kubernetes: a Deployment for one machine, a LeaderWorkerSet per role of several; scripts in a ConfigMap.

What stands before them is in `kubernetes_front`, their pods are in `pod`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.profiles.show import heading
from glm5_ascend.deploy.rendering import autoscaling, image, kubernetes_front, monitoring, scripts
from glm5_ascend.deploy.rendering.check_scripts import CHECKS, HEALTH
from glm5_ascend.deploy.rendering.kubernetes_front import ANSWERS, INSTANCE, PART_OF, full_name, service_name
from glm5_ascend.deploy.rendering.pod import pod
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import dumped
from glm5_ascend.errors import ConfigError

#: Of SGLang's memory store, in the variable ASCEND_MF_STORE_URL of its profiles.
STORE_PORT = 24667
DEFAULTS = PodValues()
ONE_GROUP = "replicas, autoscaling: the proxy of PD knows the pods of one group; render again for another namespace"


def files(profile: Profile, model: str, values: PodValues = DEFAULTS) -> dict[str, str]:
    made: dict[str, str] = {}
    for file, objects in grouped(profile, model, values).items():
        made[file] = document(profile, objects)
    for role in profile.roles.values():
        docker = image.dockerfile(profile, role)
        made[docker[0]] = docker[1]
    return made | kubernetes_front.dockerfiles(profile) | scripts.front(profile)


def grouped(profile: Profile, model: str, values: PodValues) -> dict[str, list[dict[str, Any]]]:
    """File name -> its objects."""
    refuse_what_the_proxy_does_not_know(profile, values)
    made = {
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
    made[file] = objects
    made["network.yaml"] = [network_policy(profile, values)]
    if values.monitoring.enabled:
        made["monitoring.yaml"] = monitoring.objects(profile, values)
    if values.autoscaling.enabled:
        made["autoscaling.yaml"] = autoscaling.objects(profile, values)
    for each in labelled(profile, [one for objects in made.values() for one in objects]):
        if values.namespace:
            each["metadata"]["namespace"] = values.namespace
            for subject in each.get("subjects", []):
                subject["namespace"] = values.namespace
    return made


def labelled(profile: Profile, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`kubectl get` and `delete` find all of a profile by one label."""
    for each in objects:
        each["metadata"]["labels"] = {PART_OF: profile.name} | each["metadata"].get("labels", {})
    return objects


def refuse_what_the_proxy_does_not_know(profile: Profile, values: PodValues) -> None:
    """A second group beside the first would get no request."""
    if profile.proxy and (values.replicas > 1 or values.autoscaling.enabled):
        what, _, tip = ONE_GROUP.partition("; ")
        raise ConfigError(what, tip)


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
    # Applied again, a number here would undo the autoscaler's.
    count = {} if values.autoscaling.enabled else {"replicas": values.replicas}
    if role.nodes == 1:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                **count,
                # A machine's NPUs hold one: the old one goes first, one machine after the other.
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
            **count,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "leaderWorkerTemplate": {
                "size": role.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",  # ranks that lost one another cannot go on
                "leaderTemplate": pod(profile, role, model, values, leader=True),
                "workerTemplate": pod(profile, role, model, values, leader=role.per_rank),
            },
        },
    }


def disruption(profile: Profile, role: Role) -> dict[str, Any]:
    """Drains of nodes take one pod at a time; one that is not ready holds none of them up."""
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
    """Who reaches the pods. Pods on the host's network are outside of it: their guard is the key."""
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
    if scripts.uses_store(role) and role is profile.roles["prefill"]:  # decode asks prefill for both
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
