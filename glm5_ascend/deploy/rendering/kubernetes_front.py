"""Kubernetes: the router that finds servers by labels, or the proxy of prefill and decode.

Neither needs an NPU. Their scripts are those of the other targets, in a ConfigMap.
"""

from __future__ import annotations

import hashlib
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering import image, scripts
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import manifest
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.serve.flags import KEY_VARIABLE

INSTANCE, PART_OF, ANSWERS = "app.kubernetes.io/instance", "app.kubernetes.io/part-of", "glm5-ascend/answers"
ROUTER_PORT = 8080
NOBODY = 65534
FRONT_NEEDS = {"cpu": "4", "memory": "8Gi"}
ROUTER_VERSION = "0.1.17"
#: Folder of vllm-ascend's sources in its images (Dockerfile.a3 of v0.23.0).
SOURCES = "/vllm-workspace/vllm-ascend"
DOCKERFILE = f"""\
# vllm-router: finds servers by their labels, distributes requests, and skips dead servers.
FROM python:3.12-slim
RUN pip install --no-cache-dir vllm-router=={ROUTER_VERSION}
USER nobody
ENTRYPOINT ["/bin/bash"]
"""


def objects(profile: Profile, values: PodValues) -> tuple[str, list[dict[str, Any]]]:
    """(name of the file, its objects)."""
    if profile.proxy:
        return "proxy.yaml", proxy(profile, values)
    return "router.yaml", router(profile, values)


def router(profile: Profile, values: PodValues) -> list[dict[str, Any]]:
    """One address for all replicas of the profile."""
    name = f"{profile.name}-router"
    (port,) = {role.port for role in profile.roles.values()}
    flags = [
        "--service-discovery", "--service-discovery-namespace", "$(NAMESPACE)", "--service-discovery-port", str(port),
        "--selector", f"{PART_OF}={profile.name}", f"{ANSWERS}=yes",
    ]  # fmt: skip
    container = {
        "name": "router",
        "image": registered(f"glm5-ascend-router:{ROUTER_VERSION}", values.image.router_digest, values),
        "args": ["/glm5/router.sh", *flags],
        "env": [
            {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            *key_variables(values),
        ],
        **probes("/liveness", "/liveness", ROUTER_PORT),
    }
    # One replica: only the router knows which server has a conversation's cache.
    return [*watching_pods(name), *front(profile, name, container, ROUTER_PORT, name, values)]


def watching_pods(name: str) -> list[dict[str, Any]]:
    """A service account that may only list the pods of its namespace."""
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    role, account = {"apiGroup": group, "kind": "Role", "name": name}, {"kind": "ServiceAccount", "name": name}
    return [
        manifest("v1", "ServiceAccount", name),
        manifest(f"{group}/v1", "Role", name, rules=[rule]),
        manifest(f"{group}/v1", "RoleBinding", name, roleRef=role, subjects=[account]),
    ]


def proxy(profile: Profile, values: PodValues) -> list[dict[str, Any]]:
    """vllm-ascend's example proxy or SGLang's router, in the servers' image."""
    name, port = f"{profile.name}-proxy", profile.proxy["port"]
    first, sglang = next(iter(profile.roles.values())), profile.engine == SGLANG
    container = {
        "name": "proxy",
        "image": registered(image.tag(profile, first), values.image.digest, values),
        "args": ["/glm5/proxy.sh"],
        "env": [
            *key_variables(values),
            *([] if sglang else [{"name": "PROXY", "value": f"{SOURCES}/{profile.proxy['program']}"}]),
            *(
                {"name": f"{side.upper()}_NODES", "value": " ".join(hosts(profile, profile.roles[side]))}
                for side in ("prefill", "decode")
            ),
        ],
        **(probes("/readiness", "/liveness", port) if sglang else probes("/healthcheck", "/healthcheck", port)),
    }
    return front(profile, name, container, port, None, values)


def probes(ready: str, alive: str, port: int) -> dict[str, Any]:
    """Probes. A restart takes minutes of failures, because all requests in flight go through the container."""
    return {
        "readinessProbe": {"httpGet": {"path": ready, "port": port}, "periodSeconds": 10, "timeoutSeconds": 5},
        "livenessProbe": {
            "httpGet": {"path": alive, "port": port},
            "initialDelaySeconds": 60,
            "periodSeconds": 30,
            "timeoutSeconds": 20,
            "failureThreshold": 6,
        },
    }


def hosts(profile: Profile, role: Role) -> list[str]:
    """DNS names of a role's pods in group 0, from the LeaderWorkerSet's headless Service."""
    name = full_name(profile, role)
    if role.nodes == 1:
        return [service_name(profile, role)]
    if role.engine == SGLANG:  # only node 0 answers
        return [f"{name}-0.{name}"]
    return [f"{name}-0.{name}", *(f"{name}-0-{worker}.{name}" for worker in range(1, role.nodes))]


def full_name(profile: Profile, role: Role) -> str:
    return profile.name if len(profile.roles) == 1 else f"{profile.name}-{role.name}"


def service_name(profile: Profile, role: Role) -> str:
    """Name of the Service. The workload's name is taken: a LeaderWorkerSet makes a headless Service of that name."""
    return f"{full_name(profile, role)}-http"


def registered(tag: str, digest: str | None, values: PodValues) -> str:
    """Name of an image in the registry, with its digest if known."""
    name = f"{values.image.registry.rstrip('/')}/{tag}" if values.image.registry else tag
    return f"{name.rpartition(':')[0]}@{digest}" if digest else name


def key_variables(values: PodValues) -> list[dict[str, Any]]:
    """Environment variable with the API key. A pod without the Secret does not start."""
    if values.auth.open:
        return [{"name": "OPEN", "value": "1"}]
    source = {"secretKeyRef": {"name": values.auth.api_key_secret, "key": "key"}}
    return [{"name": KEY_VARIABLE, "valueFrom": source}]


def front(
    profile: Profile, name: str, container: dict[str, Any], port: int, account: str | None, values: PodValues
) -> list[dict[str, Any]]:
    """ConfigMap, Deployment and Service of one container without an NPU, which runs its script as user nobody."""
    ((file, script),) = scripts.front(profile).items()
    container |= {
        "command": ["/bin/bash"],
        "imagePullPolicy": values.image.pull_policy,
        "ports": [{"name": "http", "containerPort": port}],
        "volumeMounts": [
            {"name": "scripts", "mountPath": "/glm5", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "resources": {"requests": FRONT_NEEDS, "limits": FRONT_NEEDS},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(values.life.leave_s)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": account is not None,  # only the router uses the API
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": values.life.leave_s + values.life.drain_s + 45,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "scripts", "configMap": {"name": name}}, {"name": "tmp", "emptyDir": {}}],
    }
    if values.image.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in values.image.pull_secrets]
    if account:
        spec["serviceAccountName"] = account
    labels = {INSTANCE: name}  # the selector; the NetworkPolicy selects by PART_OF
    annotations = {"glm5-ascend/config": hashlib.sha256(script.encode()).hexdigest()[:16]}
    template = {"metadata": {"labels": labels | {PART_OF: profile.name}, "annotations": annotations}, "spec": spec}
    ports = [{"name": "http", "port": port, "targetPort": port}]
    deployment = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    return [
        manifest("v1", "ConfigMap", name, data={file: script}),
        manifest("apps/v1", "Deployment", name, spec=deployment),
        manifest("v1", "Service", name, spec={"selector": labels, "ports": ports}),
    ]
