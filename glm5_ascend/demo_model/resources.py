"""Finds and copies the shipped checkpoint."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from glm5_ascend.errors import CheckpointError, OutputError
from glm5_ascend.files.written import copy_file, new_folder


def data_folder() -> Path:
    """Folder of the installed package that holds the checkpoint.

    Raises:
        CheckpointError: the weights are missing from the installation.
    """
    folder = Path(str(files("glm5_ascend.demo_model").joinpath("data")))
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


def write_demo_model(dst: Path) -> Path:
    """Copy the shipped checkpoint to `dst`, which must not exist or be empty; returns `dst`.

    Raises:
        OutputError: `dst` is a file or a folder with something in it, or cannot be written; nothing is left.
        CheckpointError: the installation has no weights.
    """
    source = data_folder()
    require_empty(dst)
    with new_folder(dst) as directory:
        for path in sorted(source.iterdir()):
            if path.is_file():
                copy_file(path, directory / path.name)
    return dst
