"""A ScaledObject of KEDA per role, which scales by running and waiting requests.

With waiting requests only, the replicas would be removed again as soon as no request waits.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering.kubernetes_front import full_name
from glm5_ascend.deploy.rendering.values import PodValues

#: A new server loads for an hour without taking requests: add one at a time, and remove none within the next hour.
STEP = {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 1800}]}
BEHAVIOR = {
    "scaleUp": {"stabilizationWindowSeconds": 120, **STEP},
    "scaleDown": {"stabilizationWindowSeconds": 3600, **STEP},
}


def query(profile: Profile, role: Role) -> str:
    """PromQL: requests of a role's servers, running and waiting."""
    selector = f'{{job="{profile.name}",pod=~"{full_name(profile, role)}-.*"}}'
    return f"sum(vllm:num_requests_running{selector}) + sum(vllm:num_requests_waiting{selector})"


def objects(profile: Profile, values: PodValues) -> list[dict[str, Any]]:
    return [scaled(profile, role, values) for role in profile.roles.values()]


def scaled(profile: Profile, role: Role, values: PodValues) -> dict[str, Any]:
    name, scaling = full_name(profile, role), values.autoscaling
    several = role.nodes > 1
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "leaderworkerset.x-k8s.io/v1" if several else "apps/v1",
                "kind": "LeaderWorkerSet" if several else "Deployment",
                "name": name,
            },
            "pollingInterval": 30,
            "minReplicaCount": scaling.minimum,
            "maxReplicaCount": scaling.maximum,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": BEHAVIOR}},
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": scaling.prometheus,
                        "query": query(profile, role),
                        "threshold": str(scaling.requests),
                    },
                }
            ],
        },
    }
