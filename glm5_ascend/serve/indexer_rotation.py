"""Where vllm-ascend rotates GLM-5's indexer without Triton-Ascend, by its sources: what the plugin mends, what doctor
looks at. Light: nothing of vllm-ascend is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

#: Modules of its sparse attention, of all lines: 0.23 has the first two, from 0.30 the indexer is a file of its own.
MODULES = ("attention.sfa_v1", "attention.context_parallel.sfa_cp", "attention.indexer")
OPERATOR = "npu_rotary_mul"
#: Queries and keys are rotated, each by a call.
FEWEST = 2


def rotating(folder: Path) -> dict[str, list[str]]:
    """Module -> functions in it that call `torch_npu.npu_rotary_mul`, of the vllm-ascend in `folder`."""
    found = {}
    for module in MODULES:
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        functions = _calling(path) if path.is_file() else []
        if functions:
            found[module] = functions
    return found


def known(folder: Path | None) -> bool:
    """Whether both rotations are where we look for them."""
    return folder is not None and sum(map(len, rotating(folder).values())) >= FEWEST


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
