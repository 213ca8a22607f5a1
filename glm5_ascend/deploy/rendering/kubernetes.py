"""Kubernetes: a Deployment for one machine, a LeaderWorkerSet per role of several; scripts in a ConfigMap.

What stands before them is in `kubernetes_front`.
"""

from __future__ import annotations

from typing import Any

import yaml

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.profiles.show import heading
from glm5_ascend.deploy.rendering import image, kubernetes_front, scripts
from glm5_ascend.deploy.rendering.kubernetes_front import ANSWERS, INSTANCE, PART_OF, full_name, service_name

#: What the Ascend device plugin counts.
RESOURCE = "huawei.com/Ascend910"
#: Of SGLang's memory store, in the variable ASCEND_MF_STORE_URL of its profiles.
STORE_PORT = 24667


def files(profile: Profile, model: str) -> dict[str, str]:
    made: dict[str, str] = {}
    for role in profile.roles.values():
        objects = [config_map(profile, role, model), workload(profile, role, model), service(profile, role)]
        made[f"{role.name}.yaml"] = document(profile, objects)
        docker = image.dockerfile(profile, role)
        made[docker[0]] = docker[1]
    file, objects, more = kubernetes_front.objects(profile)
    return made | {file: document(profile, objects)} | more | scripts.front(profile)


def document(profile: Profile, objects: list[dict[str, Any]]) -> str:
    return "\n".join([*heading(profile), yaml.safe_dump_all(objects, sort_keys=False, width=120)])


def config_map(profile: Profile, role: Role, model: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": full_name(profile, role)},
        "data": {scripts.script_name(role): scripts.script(profile, role, model)},
    }


def workload(profile: Profile, role: Role, model: str) -> dict[str, Any]:
    name = full_name(profile, role)
    if role.nodes == 1:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},  # two do not fit on one machine
                "selector": {"matchLabels": {INSTANCE: name}},
                "template": pod(profile, role, model, leader=True),
            },
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": role.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",  # ranks that lost one another cannot go on
                "leaderTemplate": pod(profile, role, model, leader=True),
                "workerTemplate": pod(profile, role, model, leader=role.per_rank),
            },
        },
    }


def pod(profile: Profile, role: Role, model: str, leader: bool) -> dict[str, Any]:
    """leader: it answers requests, so it is probed and found by the Service."""
    name = full_name(profile, role)
    dies = image.dies(role)
    mounts = [{"name": "scripts", "mountPath": "/glm5"}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "scripts", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{image.SHM_GIB}Gi"}},
    ]
    for number, path in enumerate((model, *image.MOUNTS)):
        mounts.append({"name": f"host-{number}", "mountPath": path, "readOnly": True})  # type: ignore[dict-item]
        volumes.append({"name": f"host-{number}", "hostPath": {"path": path}})
    container: dict[str, Any] = {
        "name": "server",
        "image": image.tag(profile, role),
        "args": [f"/glm5/{scripts.script_name(role)}"],
        "env": [{"name": image.KERNEL_CACHE[0], "value": image.KERNEL_CACHE[1]}, *place_variables(profile, role)],
        "resources": {"limits": {RESOURCE: str(dies)}, "requests": {RESOURCE: str(dies)}},
        "volumeMounts": mounts,
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    if leader:
        probe = {"httpGet": {"path": "/health", "port": role.port}}
        container["ports"] = [{"containerPort": role.port}]
        container["startupProbe"] = {**probe, "periodSeconds": 30, "failureThreshold": 120}  # an hour to load
        container["readinessProbe"] = {**probe, "periodSeconds": 10}
        container["livenessProbe"] = {**probe, "periodSeconds": 30, "failureThreshold": 5}
    labels = {INSTANCE: name, PART_OF: profile.name} | ({ANSWERS: "yes"} if leader else {})
    return {
        "metadata": {"labels": labels},
        "spec": {
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "containers": [container],
            "volumes": volumes,
        },
    }


def place_variables(profile: Profile, role: Role) -> list[dict[str, Any]]:
    """A LeaderWorkerSet gives LWS_WORKER_INDEX and LWS_LEADER_ADDRESS itself; the script reads them."""
    store = []
    if scripts.uses_store(role):
        store = [{"name": "STORE", "value": service_name(profile, profile.roles["prefill"])}]
    if role.nodes == 1:
        return store
    return [
        *store,
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NIC", "value": "eth0"},  # the machines' interface: the pods are on their network
    ]


def service(profile: Profile, role: Role) -> dict[str, Any]:
    count = role.local_ranks if role.per_rank else 1
    ports = [{"name": f"http-{i}", "port": role.port + i, "targetPort": role.port + i} for i in range(count)]
    if scripts.uses_store(role) and role is profile.roles["prefill"]:  # decode asks prefill for both
        handshake = int(role.args["disaggregation-bootstrap-port"])
        ports += [{"name": n, "port": p, "targetPort": p} for n, p in (("store", STORE_PORT), ("handshake", handshake))]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service_name(profile, role)},
        "spec": {
            "selector": {INSTANCE: full_name(profile, role), ANSWERS: "yes"},
            "ports": ports,
        },
    }
