"""The pod of a server: rights, resources, probes and termination."""

from __future__ import annotations

import hashlib
from typing import Any

from glm5_ascend.deploy.profiles.command import verify_name
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering import image, scripts
from glm5_ascend.deploy.rendering.check_scripts import HEALTH
from glm5_ascend.deploy.rendering.kubernetes_front import (
    ANSWERS,
    INSTANCE,
    PART_OF,
    full_name,
    key_variables,
    registered,
    service_name,
)
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.engine_lines import SGLANG

#: A busy server answers /health late: it is restarted after five minutes without an answer.
LIVENESS = {"periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 10}
READINESS = {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3}
STARTUP_PERIOD_S = 30
#: Seconds between the servers' own time limit and the kubelet's SIGKILL.
SPARE_S = 45
#: Order of a container's keys, for reviewers.
ORDER = (
    "name", "image", "imagePullPolicy", "command", "args", "workingDir", "env", "ports", "resources", "startupProbe",
    "readinessProbe", "livenessProbe", "lifecycle", "terminationMessagePolicy", "securityContext", "volumeMounts",
)  # fmt: skip
HOME, LOGS, SCRIPTS = "/scratch", "/var/log/glm5", "/glm5"


def pod(profile: Profile, role: Role, model: str, values: PodValues, leader: bool) -> dict[str, Any]:
    """Template of a pod. leader: it has an API, so Services select it."""
    name = full_name(profile, role)
    planned = values.scheduling
    labels = planned.labels | {INSTANCE: name, PART_OF: profile.name} | ({ANSWERS: "yes"} if leader else {})
    life, host = values.life, on_host_network(profile, role, values)
    mounts, volumes = storage(name, model, values)
    spec: dict[str, Any] = {
        "hostNetwork": host,
        "dnsPolicy": "ClusterFirstWithHostNet" if host else "ClusterFirst",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service named vllm would set VLLM_PORT
        "terminationGracePeriodSeconds": life.leave_s + life.drain_s + SPARE_S,
        "securityContext": {
            "seccompProfile": {"type": "RuntimeDefault"},
            "supplementalGroups": [values.security.device_group],
        },
        "nodeSelector": planned.node_selector,
        "tolerations": planned.tolerations,
        "schedulerName": planned.scheduler or ("volcano" if planned.pod_group else None),
        "priorityClassName": planned.priority_class,
        "imagePullSecrets": [{"name": secret} for secret in values.image.pull_secrets],
        "initContainers": [in_order(checks(profile, role, model, values, mounts))] if life.check else [],
        "containers": [in_order(server(profile, role, values, mounts, leader))],
        "volumes": volumes,
    }
    annotations = planned.annotations | {"glm5-ascend/config": config_hash(profile, role, model)}
    if planned.pod_group:
        annotations["scheduling.k8s.io/group-name"] = name
    spec = {key: value for key, value in spec.items() if value not in (None, [], {})}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def in_order(container: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(container.items(), key=lambda item: ORDER.index(item[0])))


def config_hash(profile: Profile, role: Role, model: str) -> str:
    """Hash of the script, so that a change of flags restarts the pods."""
    text = scripts.script(profile, role, model) + HEALTH
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def on_host_network(profile: Profile, role: Role, values: PodValues) -> bool:
    """HCCL and Mooncake between machines use the machines' addresses."""
    if values.network.host is not None:
        return values.network.host
    return role.nodes > 1 or bool(profile.proxy)


def server(
    profile: Profile, role: Role, values: PodValues, mounts: list[dict[str, Any]], leader: bool
) -> dict[str, Any]:
    life = values.life
    drain = [] if role.engine == SGLANG else ["--shutdown-timeout", str(life.drain_s)]
    container = common(profile, role, values, mounts) | {
        "name": "server",
        "args": [f"{SCRIPTS}/{scripts.script_name(role)}", *drain, *values.server.flags],
        "resources": resources(role, values),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(life.leave_s)]}}},
    }
    container["env"] += [*key_variables(values), *place_variables(profile, role, values)]
    startup = {"periodSeconds": STARTUP_PERIOD_S, "timeoutSeconds": 20}
    startup["failureThreshold"] = life.start_minutes * 60 // STARTUP_PERIOD_S
    count = role.local_ranks if role.per_rank else 1
    if leader:
        container["ports"] = [{"name": f"http-{i}", "containerPort": role.port + i} for i in range(count)]
    host = "127.0.0.1" if leader else "$LWS_LEADER_ADDRESS"
    container["startupProbe"] = probe(host, role.port, count, startup)
    container["readinessProbe"] = probe(host, role.port, count, READINESS)
    if leader:  # the end of the leader ends the group
        still = 0 if role.engine == SGLANG else 60 * life.still_minutes  # SGLang's /health asks the model
        container["livenessProbe"] = probe(host, role.port, count, LIVENESS, str(still))
    return container


def probe(host: str, port: int, count: int, times: dict[str, int], *still: str) -> dict[str, Any]:
    """A probe of all servers of the machine."""
    limit = times["timeoutSeconds"] - 2  # Python starts slowly on a busy machine
    line = " ".join([f'exec bash {SCRIPTS}/health.sh "{host}" {port} {count} {limit}', *still])
    return {"exec": {"command": ["/bin/bash", "-c", line]}, **times}


def checks(profile: Profile, role: Role, model: str, values: PodValues, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Init container that checks hashes, machine and profile before 400 GB are loaded."""
    engine = verify_name(role.engine, profile.platform)
    container = common(profile, role, values, mounts) | {
        "name": "checks",
        "args": [f"{SCRIPTS}/checks.sh", model, profile.name, role.name, engine, *values.server.flags],
        "resources": resources(role, values),
    }
    return container


def common(profile: Profile, role: Role, values: PodValues, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Keys of both containers. HOME and the working directory are writable, for caches of CANN and compilers."""
    environ = {image.KERNEL_CACHE[0]: image.KERNEL_CACHE[1], "HOME": HOME, "ASCEND_PROCESS_LOG_PATH": f"{LOGS}/ascend"}
    security = values.security
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": security.read_only_root,
        "capabilities": {"drop": ["ALL"], "add": list(security.capabilities)},
    }
    if security.user is not None:
        context |= {"runAsUser": security.user, "runAsNonRoot": security.user != 0}
    return {
        "image": registered(image.tag(profile, role), values.image.digest, values),
        "imagePullPolicy": values.image.pull_policy,
        "command": ["/bin/bash"],  # independent of the image's entry point
        "workingDir": HOME,
        "env": [{"name": key, "value": value} for key, value in (environ | values.server.env).items()],
        "volumeMounts": mounts,
        "securityContext": context,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last log lines appear in the pod's events
    }


def resources(role: Role, values: PodValues) -> dict[str, Any]:
    dies = image.dies(role)
    needs = {
        values.resources.npu: str(dies),
        "cpu": values.resources.cpu or str(8 * dies),
        "memory": values.resources.memory or f"{48 * dies}Gi",
    }
    # Disk has no limit: a pod above it is evicted at once, and one without a request is evicted first.
    return {"limits": needs, "requests": needs | {"ephemeral-storage": values.resources.disk}}


def storage(name: str, model: str, values: PodValues) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(mounts, volumes) of scripts, shared memory, writable folders, the checkpoint and the driver."""
    written: dict[str, dict[str, str]] = {"/tmp": {}, HOME: {}, LOGS: {"sizeLimit": values.storage.logs}}
    mounts: list[dict[str, Any]] = [
        {"name": "scripts", "mountPath": SCRIPTS, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "scripts", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values.resources.shm}},
    ]
    for path, limits in written.items():
        title = path.rpartition("/")[2]
        mounts.append({"name": title, "mountPath": path})
        volumes.append({"name": title, "emptyDir": limits})
    of_model: dict[str, Any] = {"name": "model", "mountPath": model, "readOnly": True}
    if values.storage.claim_path:
        of_model["subPath"] = values.storage.claim_path
    mounts.append(of_model)
    claim = {"persistentVolumeClaim": {"claimName": values.storage.claim, "readOnly": True}}
    volumes.append(
        {"name": "model", **(claim if values.storage.claim else {"hostPath": {"path": model, "type": "Directory"}})}
    )
    for number, (path, kind) in enumerate(image.MOUNTS.items()):
        mounts.append({"name": f"driver-{number}", "mountPath": path, "readOnly": True})
        volumes.append({"name": f"driver-{number}", "hostPath": {"path": path, "type": kind}})
    return mounts, volumes


def place_variables(profile: Profile, role: Role, values: PodValues) -> list[dict[str, Any]]:
    """Variables of the script. A LeaderWorkerSet sets LWS_WORKER_INDEX and LWS_LEADER_ADDRESS itself."""
    variables: list[dict[str, Any]] = []
    if scripts.uses_store(role):
        variables.append({"name": "STORE", "value": service_name(profile, profile.roles["prefill"])})
    if role.nodes > 1:
        variables.append({"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        if values.network.nic:
            variables.append({"name": "NIC", "value": values.network.nic})
    return variables
