"""Finds in vllm-ascend's sources where it rotates GLM-5's indexer without Triton-Ascend, for plugin and `doctor`.

Imports nothing of vllm-ascend.
"""

from __future__ import annotations

import ast
from pathlib import Path

#: Modules of its sparse attention: 0.23 has the first two, 0.30 also the third.
MODULES = ("attention.sfa_v1", "attention.context_parallel.sfa_cp", "attention.indexer")
OPERATOR = "npu_rotary_mul"
#: One call for queries, one for keys.
MIN_CALLS = 2


def rotating(folder: Path) -> dict[str, list[str]]:
    """Module of the vllm-ascend in `folder` -> its functions that call `torch_npu.npu_rotary_mul`."""
    modules = {}
    for module in MODULES:
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        functions = _calling(path) if path.is_file() else []
        if functions:
            modules[module] = functions
    return modules


def is_known(folder: Path | None) -> bool:
    """True if both rotations are where this package expects them."""
    return folder is not None and sum(map(len, rotating(folder).values())) >= MIN_CALLS


def _calling(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _calls(node)]


def _calls(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == OPERATOR
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch_npu"
        for node in ast.walk(function)
    )
