"""Compiled integer products beside torch's fp32 products, in one process: a guard against products that became slow.

The verdict is a ratio and not a time: both sides run in turns, so other load slows down both. The limits are less than
half of what is measured on an idle machine (benchmarks/README.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from glm5_kernels import ops

pytestmark = pytest.mark.long
ROUNDS = 31
HIDDEN, WIDTH, EXPERTS, CHOSEN = 6144, 2048, 4, 2


def ratio(compiled: Callable[[], object], plain: Callable[[], object]) -> float:
    """Median of plain / compiled over pairs of calls that follow each other, after two that warm up."""
    pairs = []
    for _ in range(ROUNDS + 2):
        seconds = []
        for function in (compiled, plain):
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
        pairs.append(seconds[1] / seconds[0])
    return statistics.median(pairs[2:])


@pytest.fixture(autouse=True)
def single_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("tokens", [1, 8])
def test_int8_products_of_few_tokens_are_faster_than_fp32(tokens: int) -> None:
    """They read a quarter of the bytes; measured 5.5 x with AVX-512 and 3.3 x with AVX2."""
    rows = WIDTH + 576
    x, weight = torch.randn(tokens, HIDDEN).bfloat16(), torch.randint(-127, 128, (rows, HIDDEN), dtype=torch.int8)
    quantized, floats = ops.LinearWeights(weight, ops.PER_TOKEN, torch.full((rows,), 0.01)), weight.float()
    x_float = x.float()
    assert ratio(lambda: ops.int8_linear(x, quantized), lambda: F.linear(x_float, floats)) >= 1.5


def test_int4_experts_are_faster_than_fp32() -> None:
    """They read an eighth of the bytes; measured 8.6 x with AVX-512 and 7.3 x with AVX2, of one byte per code."""
    tokens = 4
    x, share = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, CHOSEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    packed = torch.randint(0, 256, (EXPERTS, 2 * WIDTH // 2, HIDDEN), dtype=torch.uint8)
    down = torch.randint(0, 256, (EXPERTS, HIDDEN // 2, WIDTH), dtype=torch.uint8)
    w13, w2 = ops.ExpertWeights([half for rows in packed for half in rows.chunk(2)]), ops.ExpertWeights(down.unbind())
    w13_scale, w2_scale = torch.full((EXPERTS, 2 * WIDTH), 0.01), torch.full((EXPERTS, HIDDEN), 0.01)
    gate_up, floats = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    x_float = x.float()

    def plain() -> None:
        for expert in range(EXPERTS):
            token, _ = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = F.linear(x_float[token], gate_up[expert]).chunk(2, -1)
                F.linear(F.silu(gate) * up, floats[expert])

    compiled = lambda: ops.w4a8_moe(x, share, ids, w13, w13_scale, w2, w2_scale)  # noqa: E731
    assert ratio(compiled, plain) >= 2
