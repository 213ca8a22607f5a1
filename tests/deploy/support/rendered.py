"""Rendered profiles for tests."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rendering.files import rendered_texts

#: All profiles of machines with NPUs.
ATLAS = [name for name in names() if load(name).platform == "npu"]

#: One profile per shape of rendered objects and engine: one machine, several, prefill and decode apart.
SHAPES = ["a3-single-w4a8", "a3-2node", "a3-pd", "a3-pd-pp2", "rollout", "a3-2node-sglang", "a3-pd-sglang"]


def written(folder: Path, profile: str, target: str) -> Path:
    folder.mkdir()
    for name, text in rendered_texts(load(profile), target, "/models/glm5").items():
        (folder / name).write_text(text)
    return folder
