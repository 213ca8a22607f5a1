"""A grid of blocks on torch tensors: what a launch on the device does, one block after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.proof.executed.block import programs, run_block
from tests.proof.executed.clocks import Watch
from tests.proof.executed.places import Space, View
from tests.proof.executed.scalars import Values
from tests.proof.executed.text import Function, Module, UncoveredError

KINDS = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int8: "i8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
#: Arguments before the kernel's own: the cross-core flags' address, a lock and the workspace.
BEFORE, GRID = 3, 3


def launch(module: Module, grid: Sequence[int], arguments: Sequence[Any], watch: Watch, order: str) -> None:
    """Every block of `grid` in turn; what they do to each other's bytes is reported too."""
    sizes = (*grid, 1, 1)[:GRID]
    _, function = programs(module)[0]
    if len(function.arguments) != BEFORE + len(arguments) + GRID:
        raise UncoveredError(f"{function.name} takes {len(function.arguments)} arguments")
    blocks = sizes[0] * sizes[1] * sizes[2]
    env = initial_values(module, function, arguments, sizes, blocks)
    for block in range(blocks):
        run_block(module, env, block, watch, order)


def initial_values(
    module: Module, function: Function, arguments: Sequence[Any], sizes: tuple[int, ...], blocks: int
) -> Values:
    spaces: dict[int, Space] = {}
    workspace = Space("workspace", np.full(max(1, _workspace(module) * blocks), 0xA5, np.uint8), shared=True)
    lock = Space("lock", np.zeros(64, np.uint8), shared=True, prepared=True)
    names = [name for name, _ in function.arguments]
    whole = [View(space, 0, 0, (len(space.data),), (1,), "i8") for space in (lock, workspace)]
    values = [0, *whole, *(_argument(value, spaces) for value in arguments), *sizes]
    return dict(zip(names, values, strict=True))


def _argument(value: Any, spaces: dict[int, Space]) -> Any:
    """A tensor as a view of its storage; tensors of one storage share the space."""
    if not isinstance(value, torch.Tensor):
        return np.float32(value) if isinstance(value, float) else int(value)
    storage = value.untyped_storage()
    where, size = storage.data_ptr(), storage.nbytes()
    if where not in spaces:
        data = np.frombuffer((ctypes.c_uint8 * size).from_address(where), np.uint8) if size else np.zeros(0, np.uint8)
        spaces[where] = Space(f"GM argument {len(spaces)}", data, shared=True, prepared=True)
    return View(spaces[where], value.data_ptr() - where, 0, (value.numel(),), (1,), KINDS[value.dtype])


def _workspace(module: Module) -> int:
    """Bytes of a block's workspace, which the module's host function returns."""
    for function in module.functions.values():
        if function.name.endswith("_infer_workspace_shape_function"):
            return int(function.body[0].rest.partition(" ")[0])
    return 0
