"""Kustomize: a base that rendering owns, components to choose from, and one overlay that is its user's.

Render again into another folder and replace `base` and `components`: `overlays/mine` stays as it is.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rendering import autoscaling, image, kubernetes, kubernetes_front, monitoring
from glm5_ascend.deploy.rendering.kubernetes_front import PART_OF, full_name
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import dumped

#: Where a workload's pod templates stand, by its kind.
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
    made: dict[str, str] = {}
    groups = kubernetes.grouped(profile, model, values)
    for file, objects in groups.items():
        made[f"base/{file}"] = kubernetes.document(profile, objects)
    made["base/kustomization.yaml"] = kustomization("Kustomization", resources=list(groups))
    workloads = [each for objects in groups.values() for each in objects if is_server(profile, each)]
    for name, (parts, more) in components(profile, values, workloads).items():
        folder = f"components/{name}"
        made[f"{folder}/kustomization.yaml"] = kustomization("Component", **parts)
        made |= {f"{folder}/{file}": text for file, text in more.items()}
    chosen = ["../../components/auth"]
    made["overlays/mine/kustomization.yaml"] = "# Yours: choose components, add patches.\n" + kustomization(
        "Kustomization", resources=["../../base"], components=chosen
    )
    for role in profile.roles.values():
        docker = image.dockerfile(profile, role)
        made[docker[0]] = docker[1]
    return made | kubernetes_front.dockerfiles(profile)


def kustomization(kind: str, **parts: Any) -> str:
    version = "v1beta1" if kind == "Kustomization" else "v1alpha1"
    return dumped([{"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind, **parts}])


def is_server(profile: Profile, each: dict[str, Any]) -> bool:
    names = [full_name(profile, role) for role in profile.roles.values()]
    return each["kind"] in TEMPLATES and each["metadata"]["name"] in names


Component = tuple[dict[str, Any], dict[str, str]]


def components(profile: Profile, values: PodValues, workloads: list[dict[str, Any]]) -> dict[str, Component]:
    """Name -> (parts of its kustomization, further files)."""
    secret = {
        "name": values.auth.api_key_secret,
        "envs": ["api-key.env"],
        "options": {
            "disableNameSuffixHash": True,
            "labels": {PART_OF: profile.name},
        },  # pods that render elsewhere name it as it is
    }
    made: dict[str, Component] = {
        "auth": ({"secretGenerator": [secret]}, {"api-key.env": KEY_FILE}),
        "pvc": ({"patches": [patch(each, claimed(each)) for each in workloads]}, {}),
    }
    if not profile.proxy:  # the proxy of PD knows the pods of one group by their names
        twice = [operation("replace", "/spec/replicas", 2)]
        made["two-replicas"] = ({"patches": [patch(each, twice) for each in workloads]}, {})
        if not values.autoscaling.enabled:
            scaled = {"scaled.yaml": dumped(kubernetes.labelled(profile, autoscaling.objects(profile, values)))}
            without = [{"op": "remove", "path": "/spec/replicas"}]
            parts = {"resources": ["scaled.yaml"], "patches": [patch(each, without) for each in workloads]}
            made["autoscaling"] = (parts, scaled)
    if not values.monitoring.enabled:
        seen = dumped(kubernetes.labelled(profile, monitoring.objects(profile, values)))
        made["monitoring"] = ({"resources": ["monitoring.yaml"]}, {"monitoring.yaml": seen})
    if not values.scheduling.pod_group:
        groups = [kubernetes.pod_group(profile, role, values.replicas) for role in profile.roles.values()]
        parts = {"resources": ["groups.yaml"], "patches": [patch(each, ganged(each)) for each in workloads]}
        made["volcano"] = (parts, {"groups.yaml": dumped(kubernetes.labelled(profile, groups))})
    return made


def patch(target: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    named = {"kind": target["kind"], "name": target["metadata"]["name"]}
    return {"target": named, "patch": dumped([operations])}


def operation(op: str, path: str, value: Any) -> dict[str, Any]:
    return {"op": op, "path": path, "value": value}


def ganged(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Volcano takes all pods of the group at once, or none."""
    made = []
    for path in TEMPLATES[workload["kind"]]:
        annotation = f"{path}/metadata/annotations/scheduling.k8s.io~1group-name"
        made.append(operation("add", f"{path}/spec/schedulerName", "volcano"))
        made.append(operation("add", annotation, workload["metadata"]["name"]))
    return made


def claimed(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The checkpoint from a claim of the name `CLAIM`, instead of the machine's folder."""
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}
    made = []
    for path in TEMPLATES[workload["kind"]]:
        place: Any = workload
        for key in path.strip("/").split("/"):
            place = place[key]
        number = [each["name"] for each in place["spec"]["volumes"]].index("model")
        made.append(operation("replace", f"{path}/spec/volumes/{number}", volume))
    return made
