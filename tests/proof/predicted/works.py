"""All launches of an op's call, one after the other, timed as they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from glm5_kernels.ascend.triton.launch import launched_by
from tests.proof.executed.places import Space
from tests.proof.executed.text import Module
from tests.proof.predicted.launches import Launch, predict
from tests.proof.predicted.timed import Memory

Compile = Callable[[Any, tuple[Any, ...], dict[str, Any]], Module]


def predict_call(call: Callable[[], Any], compiled: Compile) -> list[Launch]:
    """The launches of `call()`. Of launches alike the first two and every sixteenth are timed: the others find in L2
    what the first one brought there."""
    found: list[Launch] = []
    seen: Counter[Any] = Counter()
    latest: dict[Any, Launch] = {}
    memory = Memory()

    def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        key = kernel.__name__, tuple(constants.items()), grid
        if seen[key] % 16 == 0 or seen[key] == 1:
            latest[key] = predict(compiled(kernel, arguments, constants), grid, arguments, memory)
            for tensor in stand_in(kernel.__name__, arguments):
                _warm(memory, tensor)
        seen[key] += 1
        found.append(latest[key])

    with launched_by(launch):
        call()
    return found


def stand_in(kernel: str, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """What the blocks that were not timed would have left for the next kernel; returns the tensors it writes."""
    if kernel == "score_pages":
        scores, visible = arguments[8], arguments[7]
        draw = torch.Generator().manual_seed(1)
        scores.copy_(torch.randn(scores.shape, generator=draw))
        scores[torch.arange(scores.shape[1])[None] >= visible[:, None]] = float("nan")
        return [scores]
    return [value for value in arguments if isinstance(value, torch.Tensor)][-3:]


def _warm(memory: Memory, tensor: torch.Tensor) -> None:
    import ctypes

    import numpy as np

    storage = tensor.untyped_storage()
    data = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)
    memory.fill(Space("", data))
