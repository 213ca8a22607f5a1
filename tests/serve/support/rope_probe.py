"""Largest error per query head of vLLM's C++ CPU rope on a 3-D query, and on the same data flattened. Prints JSON."""

from __future__ import annotations

import json

import torch
import vllm._custom_ops as vllm_ops
from vllm.platforms import current_platform

current_platform.import_kernels()
torch.manual_seed(0)
TOKENS, HEADS, DIM = 10, 4, 64
positions = torch.arange(TOKENS)
angle = positions[:, None].float() * 1e6 ** (-torch.arange(0, DIM, 2) / DIM)
cache = torch.cat([angle.cos(), angle.sin()], -1)


def rotated(x: torch.Tensor) -> torch.Tensor:
    # pairs (0, 1), (2, 3), ...
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def main() -> None:
    query, key = torch.randn(TOKENS, HEADS, DIM), torch.randn(TOKENS, 1, DIM)
    want = rotated(query)
    flat, flat_key = query.clone().view(TOKENS, -1), key.clone().view(TOKENS, -1)
    vllm_ops.rotary_embedding(positions, flat, flat_key, DIM, cache, False)
    whole, whole_key = query.clone(), key.clone()
    vllm_ops.rotary_embedding(positions, whole, whole_key, DIM, cache, False)
    print(
        json.dumps(
            {
                "three_d": (whole - want).abs().amax((0, 2)).tolist(),
                "flat": float((flat.view(TOKENS, HEADS, DIM) - want).abs().max()),
                "key": float((whole_key - rotated(key)).abs().max()),
            }
        )
    )


if __name__ == "__main__":
    main()
