"""Data files inside the package, and the JSON schemas of its YAML files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from glm5_ascend.errors import MissingEnvironmentError

if TYPE_CHECKING:
    from pydantic import BaseModel


def data_dir(name: str) -> Path:
    """Return directory `name` of the package, e.g. `data/quant_recipes`.

    Raises:
        MissingEnvironmentError: the checkout lost its links (git's core.symlinks=false) or the install is incomplete.
    """
    path = Path(str(files("glm5_ascend").joinpath(*name.split("/"))))
    if not path.is_dir():
        raise MissingEnvironmentError(
            f"{path}: data directory is missing", "clone with `git -c core.symlinks=true clone`, or install the wheel"
        )
    return path


def near(name: str, names: Iterable[str], what: str = "known") -> str:
    """Return a tip for an unknown name: the closest of `names`, and all of them, introduced by `what`."""
    import difflib

    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"{what}: {', '.join(names)}"


def schema_text(model: type[BaseModel]) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(by_alias=True)}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def write_schemas(folder: Path, models: Mapping[str, type[BaseModel]]) -> None:
    """Write the schema of every model under its file name, and print the paths."""
    folder.mkdir(exist_ok=True)
    for name, model in models.items():
        (folder / name).write_text(schema_text(model), encoding="utf-8")
        print(folder / name)
