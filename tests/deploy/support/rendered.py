"""Profiles for tests: the switches that one states, and its rendered files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from glm5_ascend.deploy.profiles.load import Profile, Role, load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.serve.options import ServeOptions

#: One profile per shape of rendered objects and engine: one machine, several, prefill and decode apart.
SHAPES = ["a3-single-w4a8", "a3-2node", "a3-pd", "a3-pd-pp2", "rollout", "a3-2node-sglang", "a3-pd-sglang"]


def switches(profile: Profile, role: Role) -> dict[str, bool]:
    """Which parts of the engine a role has switched on, by the profile's list."""
    return {
        name: switch.on if isinstance(switch.on, bool) else role.name in switch.on
        for name, switch in profile.scheduling.items()
    }


def placed(node: int, rank: int = 0) -> ServeOptions:
    return ServeOptions("DIR", node=node, rank=rank, head="10.0.0.1", ip="10.0.0.2", nic="eth0")


def written(folder: Path, profile: str, target: str) -> Path:
    folder.mkdir()
    for name, text in rendered_texts(load(profile), target, "/models/glm5").items():
        (folder / name).write_text(text)
    return folder


def objects_in(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Kubernetes objects of all files by kind and name."""
    objects = [item for path in sorted(folder.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text())]
    named = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert len(named) == len(objects)  # two of one kind and name would overwrite each other
    return named


def pods_in(folder: Path) -> list[dict[str, Any]]:
    """Templates of all pods: those of Deployments, of leaders and of workers."""
    templates = []
    for (kind, _), item in objects_in(folder).items():
        if kind == "LeaderWorkerSet":
            templates += [item["spec"]["leaderWorkerTemplate"][key] for key in ("leaderTemplate", "workerTemplate")]
        elif kind == "Deployment":
            templates.append(item["spec"]["template"])
    return templates
