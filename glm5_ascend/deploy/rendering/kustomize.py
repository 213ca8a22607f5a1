"""Kustomize: a rendered base, and an overlay for the user.

To update, render into another folder and replace `base`; keep `overlays/mine`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rendering import kubernetes
from glm5_ascend.deploy.rendering.kubernetes_front import PART_OF
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import dumped

MINE = "overlays/mine"
KEY_FILE = "# A long random text; keep the file out of git. Servers do not start with an empty one.\nkey=\n"


def files(profile: Profile, model: str, values: PodValues = kubernetes.DEFAULTS) -> dict[str, str]:
    """File name -> text."""
    groups = kubernetes.grouped(profile, model, values)
    texts = {f"base/{file}": kubernetes.document(profile, objects) for file, objects in groups.items()}
    texts["base/kustomization.yaml"] = kustomization(resources=list(groups))
    secret = {
        "name": values.auth.api_key_secret,
        "envs": ["api-key.env"],
        # Servers refer to the Secret by this name.
        "options": {"disableNameSuffixHash": True, "labels": {PART_OF: profile.name}},
    }
    mine = kustomization(resources=["../../base"], secretGenerator=[secret])
    texts[f"{MINE}/kustomization.yaml"] = "# Yours: add patches.\n" + mine
    texts[f"{MINE}/api-key.env"] = KEY_FILE
    return texts | kubernetes.dockerfiles(profile)


def kustomization(**parts: Any) -> str:
    return dumped([{"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **parts}])
