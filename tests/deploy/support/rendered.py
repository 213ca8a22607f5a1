"""A profile rendered into a folder."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rendering.files import rendered_texts

#: Profiles of machines with NPUs.
ATLAS = [name for name in names() if load(name).platform == "npu"]


def written(folder: Path, profile: str, target: str) -> Path:
    folder.mkdir()
    for name, text in rendered_texts(load(profile), target, "/models/glm5").items():
        (folder / name).write_text(text)
    return folder
