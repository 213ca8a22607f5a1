"""Finds and copies the shipped checkpoints."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from glm5_ascend.errors import CheckpointError, OutputError
from glm5_ascend.files.written import copy_file, new_folder


class DemoModel(StrEnum):
    """The shipped models."""

    GLM5 = "glm-5"
    FLASH = "glm-5.3-flash"
    SMOLLM2 = "smollm2"


def data_folder(model: DemoModel = DemoModel.GLM5) -> Path:
    """Folder of the installed package with a model's own files; a Flash takes the others from GLM-5's.

    Raises:
        CheckpointError: the weights are missing from the installation.
    """
    name = "flash" if model is DemoModel.FLASH else "data"
    folder = Path(str(files("glm5_ascend.demo_model").joinpath(name)))
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            f"{folder}/model.safetensors: missing from this installation",
            "install glm5-ascend again",
        )
    return folder


def require_empty(dst: Path) -> None:
    """Raise `OutputError` unless `dst` is missing or an empty folder."""
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise OutputError(f"{dst}: exists and is not an empty folder", "name a new folder, or remove this one")


def write_demo_model(dst: Path, model: DemoModel = DemoModel.GLM5) -> Path:
    """Copy a shipped checkpoint to `dst`, which must not exist or be empty; returns `dst`.

    Raises:
        OutputError: `dst` is a file or a folder with something in it, or cannot be written; nothing is left.
        CheckpointError: the installation has no weights.
    """
    sources = {path.name: path for folder in (data_folder(), data_folder(model)) for path in folder.iterdir()}
    require_empty(dst)
    with new_folder(dst) as directory:
        for name in sorted(sources):
            if sources[name].is_file():
                copy_file(sources[name], directory / name)
    return dst
