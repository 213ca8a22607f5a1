"""Recipes written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DYNAMIC = {"scope": "per_token", "dtype": "int8", "symmetric": True}
STATIC = {"scope": "per_tensor", "dtype": "int8", "symmetric": False}
INT8 = {"scope": "per_channel", "dtype": "int8", "symmetric": True}
INT4 = {"scope": "per_channel", "dtype": "int4", "symmetric": True}


def linear(act: dict[str, Any], weight: dict[str, Any], *include: str, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
    qconfig = {"act": act, "weight": weight}
    return {"type": "linear_quant", "qconfig": qconfig, "include": list(include), "exclude": list(exclude)}


def write_recipe(path: Path, *steps: dict[str, Any]) -> Path:
    recipe = {"apiversion": "glm5_ascend_v1", "metadata": {"config_id": "mine"}, "spec": {"process": list(steps)}}
    path.write_text(yaml.safe_dump(recipe))
    return path
