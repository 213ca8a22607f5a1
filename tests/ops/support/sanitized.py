"""Runs every op in C++, and the sublayers, on a library that a sanitizer watches; it does not see Python and torch.

    python -m tests.ops.support.sanitized LIBRARY [OP ...]

`tests/ops/test_sanitizers.py` builds the library and starts this with the sanitizer's runtime loaded first. Operands
are those of the parity suite, and shapes whose rows, tiles and groups are not full. Results are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from glm5_kernels import registry
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, PER_TOKEN
from glm5_kernels.native import library
from glm5_kernels.native.sublayers import MlaSublayer, MlpSublayer
from glm5_kernels.paged_cache import PagedBatch
from glm5_kernels.parity.cases import cases, linear_weights
from glm5_kernels.parity.flash import mhc_operands
from glm5_kernels.parity.run import copied
from glm5_kernels.w4a8_moe import ExpertWeights
from tests.ops.support.sublayers import draw_layer, draw_step, in_one_call

#: Variants of the parity suite that only repeat what smaller ones do.
LARGE = "prefill", "chunk", "top 2048", "40 tokens", "size 6144, dim 0"


def ragged(generator: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Ops and operands: sizes next to those of vectors, tiles and groups of tokens."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for tokens in (0, 1, 3, 17, 33):
        for n, k in ((1, 1), (7, 63), (33, 65), (9, 2113), (65, 257)):
            for mode in (PER_TOKEN, PER_TENSOR):
                yield "int8_linear", (randn(tokens, k), linear_weights(mode, n, k, torch.float32, generator))
        for hidden, width, per in ((64, 32, 2), (130, 66, 2), (192, 48, 1), (65, 33, 1)):
            w13, w2 = (
                ExpertWeights(torch.randint(*limits, shape, dtype=dtype, generator=generator).unbind())
                for shape in ((6, width // per, hidden), (3, hidden // per, width))
                for limits, dtype in [((0, 256), torch.uint8) if per == 2 else ((-128, 128), torch.int8)]
            )
            ids = torch.randint(-1, 3, (tokens, 2), generator=generator)
            scales = torch.rand(3, 2 * width, generator=generator), torch.rand(3, hidden, generator=generator)
            yield "w4a8_moe", (randn(tokens, hidden), torch.rand(tokens, 2), ids, w13, scales[0], w2, scales[1])
        for dtype in (torch.float32, torch.bfloat16):
            yield "rms_norm", (randn(tokens, 80).to(dtype), randn(tokens, 80).to(dtype), randn(80).to(dtype), 1e-5)
            for n, columns, joins in ((1, 16, True), (4, 560, True), (8, 48, False)):
                yield "mhc", mhc_operands(tokens, n, columns, dtype, joins, generator)
            yield "v_up_proj", (randn(tokens, 3, 96).to(dtype), randn(3, 96, 40).to(dtype))
            for keys, values in ((16, 16), (32, 48)):
                operands = randn(2, tokens, 3, keys).to(dtype), randn(tokens, 3, values).to(dtype)
                slots, states = torch.randperm(tokens + 1, generator=generator), randn(tokens + 1, 3, keys, values)
                decay, starts = (
                    -torch.rand(tokens, 3, keys, generator=generator),
                    torch.tensor([0, tokens // 2, tokens]),
                )
                tables = starts, torch.stack([slots[-1], torch.tensor(-1)]), slots[:tokens]
                yield "kda", (*operands[0], operands[1], decay, torch.rand(tokens, 3), states, *tables)
            batch = PagedBatch(torch.tensor([0, tokens]), torch.tensor([tokens + 20]), torch.tensor([[3, 1, 2, 0]]))
            for dim in (16, 48):
                tail, pools, ape = randn(2, 2, 7, dim).to(dtype), randn(4, 3, dim), randn(3, dim)
                tokens_of = randn(2, tokens, dim).to(dtype)
                yield "indexer_pool", (*tokens_of, ape, batch, torch.tensor([1]), tail, pools)
            for heads, dims, topk in ((1, 32, 3), (17, 64, 40), (32, 48, 16)):
                q, keys = randn(tokens, heads, dims).to(dtype), randn(4, 16, dims).to(dtype)
                yield "lightning_indexer", (q, keys, randn(tokens, heads).to(dtype), batch, topk)
            for heads, rank, rope in ((1, 32, 16), (5, 64, 32), (17, 128, 64)):
                rows = randn(4, 16, rank + rope).to(dtype)
                positions = torch.randint(0, 20 + tokens, (tokens, 19), generator=generator).int()
                q = randn(tokens, heads, rank).to(dtype), randn(tokens, heads, rope).to(dtype)
                yield "sparse_flash_attention", (*q, rows[..., :rank], rows[..., rank:], positions, batch, 0.1, True)
    for bits, rows_of, k in ((4, 2, 17), (8, 3, 33), (8, 1, 1)):
        scale = torch.full((rows_of, 1), 0.1)
        yield "round_rows", (randn(rows_of, k), scale, bits, 1)
        yield "fake_round", (randn(rows_of, k), torch.ones(k), 2 ** (bits - 1) - 1, 2)
        yield "ssz_scale", (randn(rows_of, k), 2 ** (bits - 1) - 1, 4, torch.linspace(0.5, 1.0, 5))


def calls(ops: list[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Op and arguments of every call."""
    for case in cases(ops=ops):
        if not any(word in case.variant for word in LARGE):
            yield case.op, case.arguments
    yield from ((op, arguments) for op, arguments in ragged(torch.Generator().manual_seed(0)) if op in ops)


def run_sublayers() -> None:
    for mode in (PER_TOKEN, PER_TENSOR, NO_QUANT):
        for selects in (True, False):
            layer = draw_layer(mode, by_columns=selects, indexer=selects, routed=selects)
            for tokens in (1, 3, 16):
                step = draw_step(tokens, selects)
                in_one_call(MlaSublayer(layer.attention), step)
                MlpSublayer(layer.mlp)(step.x, step.x)


def main(path: str, names: list[str]) -> None:
    library.PATH = Path(path)
    ops = names or [op for op in registry.OPS if "cpu" in registry.OPS[op]]
    made = list(calls(ops))
    for instruction_set in library.instruction_sets():
        with library.using(instruction_set):
            for op, arguments in made:
                registry.load(op, "cpu")(*(copied(argument, "cpu") for argument in arguments))
            if not names:
                run_sublayers()
        print(f"{instruction_set}: {len(made)} calls of {len(ops)} ops", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
