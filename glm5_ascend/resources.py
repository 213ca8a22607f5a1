"""Data files that travel inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from glm5_ascend.errors import MissingEnvironmentError


def data_dir(name: str) -> Path:
    """Directory `name` of the package, e.g. `data/quant_recipes`.

    Raises:
        MissingEnvironmentError: the checkout lost its links (git's core.symlinks=false) or the install is incomplete.
    """
    path = Path(str(files("glm5_ascend").joinpath(*name.split("/"))))
    if not path.is_dir():
        raise MissingEnvironmentError(
            f"{path}: data directory is missing", "clone with `git -c core.symlinks=true clone`, or install the wheel"
        )
    return path
