"""Kustomize: a rendered base, optional components, and an overlay for the user.

To update, render into another folder and replace `base` and `components`; keep `overlays/mine`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rendering import autoscaling, image, kubernetes, kubernetes_front, monitoring
from glm5_ascend.deploy.rendering.kubernetes_front import PART_OF, full_name
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import dumped

#: Kind of a workload -> paths of its pod templates.
TEMPLATES = {
    "Deployment": ("/spec/template",),
    "LeaderWorkerSet": (
        "/spec/leaderWorkerTemplate/leaderTemplate",
        "/spec/leaderWorkerTemplate/workerTemplate",
    ),
}
CLAIM = "glm5-weights"
KEY_FILE = "# A long random text; keep the file out of git. Servers do not start with an empty one.\nkey=\n"


def files(profile: Profile, model: str, values: PodValues = kubernetes.DEFAULTS) -> dict[str, str]:
    """File name -> text."""
    texts: dict[str, str] = {}
    groups = kubernetes.grouped(profile, model, values)
    for file, objects in groups.items():
        texts[f"base/{file}"] = kubernetes.document(profile, objects)
    texts["base/kustomization.yaml"] = kustomization("Kustomization", resources=list(groups))
    workloads = [item for objects in groups.values() for item in objects if is_server(profile, item)]
    for name, (parts, more) in components(profile, values, workloads).items():
        folder = f"components/{name}"
        texts[f"{folder}/kustomization.yaml"] = kustomization("Component", **parts)
        texts |= {f"{folder}/{file}": text for file, text in more.items()}
    texts["overlays/mine/kustomization.yaml"] = "# Yours: choose components, add patches.\n" + kustomization(
        "Kustomization", resources=["../../base"], components=["../../components/auth"]
    )
    for role in profile.roles.values():
        docker = image.dockerfile(profile, role)
        texts[docker[0]] = docker[1]
    return texts | kubernetes_front.dockerfiles(profile)


def kustomization(kind: str, **parts: Any) -> str:
    version = "v1beta1" if kind == "Kustomization" else "v1alpha1"
    return dumped([{"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind, **parts}])


def is_server(profile: Profile, item: dict[str, Any]) -> bool:
    names = [full_name(profile, role) for role in profile.roles.values()]
    return item["kind"] in TEMPLATES and item["metadata"]["name"] in names


Component = tuple[dict[str, Any], dict[str, str]]


def components(profile: Profile, values: PodValues, workloads: list[dict[str, Any]]) -> dict[str, Component]:
    """Name -> (parts of its kustomization, further files)."""
    secret = {
        "name": values.auth.api_key_secret,
        "envs": ["api-key.env"],
        "options": {
            "disableNameSuffixHash": True,
            "labels": {PART_OF: profile.name},
        },  # servers refer to it by this name
    }
    named: dict[str, Component] = {
        "auth": ({"secretGenerator": [secret]}, {"api-key.env": KEY_FILE}),
        "pvc": ({"patches": [patch(item, claimed(item)) for item in workloads]}, {}),
    }
    if not profile.proxy:  # the proxy of PD knows the pods of one group by their names
        twice = [operation("replace", "/spec/replicas", 2)]
        named["two-replicas"] = ({"patches": [patch(item, twice) for item in workloads]}, {})
        if not values.autoscaling.enabled:
            scaled = {"scaled.yaml": dumped(kubernetes.labelled(profile, autoscaling.objects(profile, values)))}
            without = [{"op": "remove", "path": "/spec/replicas"}]
            parts = {"resources": ["scaled.yaml"], "patches": [patch(item, without) for item in workloads]}
            named["autoscaling"] = (parts, scaled)
    if not values.monitoring.enabled:
        seen = dumped(kubernetes.labelled(profile, monitoring.objects(profile, values)))
        named["monitoring"] = ({"resources": ["monitoring.yaml"]}, {"monitoring.yaml": seen})
    if not values.scheduling.pod_group:
        groups = [kubernetes.pod_group(profile, role, values.replicas) for role in profile.roles.values()]
        parts = {"resources": ["groups.yaml"], "patches": [patch(item, ganged(item)) for item in workloads]}
        named["volcano"] = (parts, {"groups.yaml": dumped(kubernetes.labelled(profile, groups))})
    return named


def patch(target: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    named = {"kind": target["kind"], "name": target["metadata"]["name"]}
    return {"target": named, "patch": dumped([operations])}


def operation(op: str, path: str, value: Any) -> dict[str, Any]:
    return {"op": op, "path": path, "value": value}


def ganged(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Operations for Volcano, which schedules all pods of a group or none."""
    operations = []
    for path in TEMPLATES[workload["kind"]]:
        annotation = f"{path}/metadata/annotations/scheduling.k8s.io~1group-name"
        operations.append(operation("add", f"{path}/spec/schedulerName", "volcano"))
        operations.append(operation("add", annotation, workload["metadata"]["name"]))
    return operations


def claimed(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Operations that mount the checkpoint from the claim `CLAIM` instead of a folder of the machine."""
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}
    operations = []
    for path in TEMPLATES[workload["kind"]]:
        template: Any = workload
        for key in path.strip("/").split("/"):
            template = template[key]
        number = [item["name"] for item in template["spec"]["volumes"]].index("model")
        operations.append(operation("replace", f"{path}/spec/volumes/{number}", volume))
    return operations
