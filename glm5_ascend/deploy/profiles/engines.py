"""Differences between the engines' command lines: the program and the spelling of flags."""

from __future__ import annotations

import json
from typing import Any

from glm5_ascend.engine_lines import SGLANG, VLLM

#: Words before the model; after it come only flags.
_HEADS = {VLLM: ("vllm", "serve"), SGLANG: ("python", "-m", "sglang.launch_server", "--model-path")}


def verify_name(engine: str, platform: str) -> str:
    """Name of the engine for `verify --engine`."""
    return engine if engine == SGLANG or platform == "cpu" else "vllm-ascend"


def head(engine: str, model: str) -> list[str]:
    """Program and model."""
    return [*_HEADS[engine], model]


def as_flag(engine: str, name: str, value: Any) -> list[str]:
    """A flag of a profile as words. SGLang has no `--no-x` and takes lists as several words."""
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [] if engine == SGLANG else [f"--no-{name}"]
    if isinstance(value, list) and engine == SGLANG:
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
