"""The routed experts alone, ours or kt-kernel's, for bench_peers.py: GLM-5's widths, 8 of 32 experts.

    python benchmarks/peers/experts.py ours|KT_CLASS THREADS TOKENS...      one JSON object per number of tokens

The weights are the same bf16 ones, which each side rounds itself. Before every call 256 MB are read, so that caches
are cold, and each call has other experts. `error` is the relative error to the bf16 experts, `gb` what packed INT4
of the chosen ones is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

HIDDEN, WIDTH, EXPERTS, CHOSEN = 6144, 2048, 32, 8
#: Experts of different values; the others repeat them, in memory of their own.
DIFFERENT = 4
#: Scales of kt-kernel's grouped INT4: one per so many columns.
GROUP = 32
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def random_experts() -> Weights:
    """Gate, up and down projections, bf16 [DIFFERENT, rows, columns]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    gate, up, down = (
        torch.empty(DIFFERENT, *shape).normal_(0, shape[1] ** -0.5, generator=generator).bfloat16() for shape in shapes
    )
    return gate, up, down


def rounded(weight: torch.Tensor, group: int, levels: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values of [E, N, K] and scales fp32 [E, N, K / group], symmetric."""
    parts = weight.float().unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1) / levels
    return (parts / scale[..., None]).round().clamp(-levels - 1, levels).flatten(-2).to(torch.int8), scale


def repeated(tensor: torch.Tensor) -> torch.Tensor:
    """[DIFFERENT, ...] -> [EXPERTS, ...], a copy."""
    return tensor.repeat(EXPERTS // DIFFERENT, *[1] * (tensor.dim() - 1))


def ours(weights: Weights) -> Forward:
    """`w4a8_moe` on packed rows, one scale per row."""
    from glm5_kernels import ops

    def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = rounded(weight, weight.shape[-1])
        pairs = values.view(torch.uint8).unflatten(1, (-1, 2))
        return repeated((pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)), repeated(scale[..., 0])

    (gate, gate_scale), (up, up_scale), (down, down_scale) = (packed(weight) for weight in weights)
    w13 = ops.ExpertWeights([block for pair in zip(gate, up, strict=True) for block in pair])
    w2, w13_scale = ops.ExpertWeights(down.unbind()), torch.cat([gate_scale, up_scale], 1)
    return lambda x, ids, share: ops.w4a8_moe(x, share, ids, w13, w13_scale, w2, down_scale)


def kt(name: str, threads: int, weights: Weights) -> Forward:
    """A class of kt-kernel: one scale per row, or per GROUP columns for `KGroup`."""
    from kt_kernel import kt_kernel_ext  # type: ignore[import-not-found]

    pool = kt_kernel_ext.CPUInfer(threads)
    config = kt_kernel_ext.moe.MOEConfig(EXPERTS, CHOSEN, HIDDEN, WIDTH, 0)
    config.max_len, config.pool = 1024, pool.backend_
    tensors: list[torch.Tensor] = []
    for part, weight in zip(("gate", "up", "down"), weights, strict=True):
        if "KGroup" in name:
            values, scale = rounded(weight, GROUP)
            pairs = (values + 8).view(torch.uint8).unflatten(-1, (-1, 2))
            tensors += [repeated(pairs[..., 0] | (pairs[..., 1] << 4)), repeated(scale.bfloat16())]
            setattr(config, f"{part}_projs", [[block.data_ptr() for block in tensors[-2]]])
            setattr(config, f"{part}_scales", [[block.data_ptr() for block in tensors[-1]]])
            config.quant_config.bits, config.quant_config.group_size = 4, GROUP
            config.quant_config.zero_point = False
        else:
            tensors.append(repeated(weight))
            setattr(config, f"{part}_proj", tensors[-1].data_ptr())
    moe, order = getattr(kt_kernel_ext.moe, name)(config), torch.arange(EXPERTS)
    pool.submit(moe.load_weights_task(order.data_ptr()))
    pool.sync()

    def forward(x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out, count = torch.empty_like(x), torch.tensor([len(x)])
        addresses = ids.data_ptr(), share.data_ptr(), x.data_ptr(), out.data_ptr()
        pool.submit(moe.forward_task(count.data_ptr(), CHOSEN, *addresses, False))
        pool.sync()
        return out

    return forward


def exact(weights: Weights, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The bf16 experts in fp32, for one token."""
    outputs = []
    for expert in ids[0].tolist():
        gate, up, down = (weight[expert % DIFFERENT].float() for weight in weights)
        outputs.append(F.linear(F.silu(F.linear(x.float(), gate)) * F.linear(x.float(), up), down))
    return (torch.stack(outputs, -1) * share).sum(-1)


def main() -> None:
    name, threads, *sizes = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    torch.set_num_threads(int(threads))
    weights = random_experts()
    forward = ours(weights) if name == "ours" else kt(name, int(threads), weights)
    memory, generator = torch.ones(2**26), torch.Generator().manual_seed(1)
    for tokens in map(int, sizes):
        error, times, read = 0.0, list[float](), list[float]()
        for call in range(1 + (40 if tokens <= 8 else 9 if tokens < 512 else 3)):
            x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
            ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(tokens)])
            share = torch.rand(tokens, CHOSEN, generator=generator)
            memory.sum()
            began = time.perf_counter()
            out = forward(x, ids, share)
            times += [1e3 * (time.perf_counter() - began)] if call else []  # the first one compiles
            read.append(len(ids.unique()) * 3 * HIDDEN * WIDTH / 2 / 1e9)
            if tokens == 1:
                want = exact(weights, x, ids, share)
                error = float((out.float() - want).norm() / want.norm())
        result: dict[str, Any] = {"command": f"experts:{tokens}", "ms": times, "gb": read, "error": error}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
