"""What the compiler makes of three inner loops for NUMBA_CPU_NAME; prints counts as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from glm5_kernels import int8
from glm5_kernels.compiled import fp32_product, int8_grouped, int8_product
from glm5_kernels.compiled.int8_backends import BACKEND
from glm5_kernels.w4a8_moe import ExpertWeights

#: What multiplies, by the names that the test asks for.
MULTIPLIES = {"smmla": r"\tsmmla\t", "sdot": r"\tsdot\t", "fmla": r"\tfml[as]\t"}


def counted(function: Any, inner: str) -> dict[str, int]:
    """Instructions in what was compiled of a function; calls: within the blocks that `inner` multiplies in."""
    text = "\n".join(function.inspect_asm().values())
    blocks = [block for block in re.split(r"^\.?\w+:", text, flags=re.M) if re.search(MULTIPLIES[inner], block)]
    instructions = {name: len(re.findall(pattern, text)) for name, pattern in MULTIPLIES.items()}
    return instructions | {"blocks": len(blocks), "calls": sum(len(re.findall(r"\tblr?\t", block)) for block in blocks)}


def _is_exact(packed: bool, tokens: int) -> bool:
    """Tokens times 128 weight rows, four places at once: the same bits as the reference."""
    bits = torch.randint(-128, 128, (64 if packed else 128, 192), dtype=torch.int8)
    codes, scale, x = int8.unpack_int4(bits) if packed else bits, torch.rand(1, 128), torch.randn(tokens, 192)
    weights = int8_grouped.of_experts(ExpertWeights([bits.view(torch.uint8) if packed else bits]), scale)
    groups = int8_grouped.one_group(tokens)
    product = int8_grouped.grouped_product(int8_grouped.quantized(x), groups, weights, x.dtype)
    expected = int8.apply_linear(x, int8.LinearWeights(codes, int8.PER_TOKEN, scale[0]), x.dtype)
    return torch.equal(product, expected)


def main() -> None:
    exact = True
    for tokens, rows, columns in ((7, 72, 256), (1, 4, 64), (33, 12, 128), (7, 70, 256), (1, 3, 64), (33, 9, 128)):
        a = torch.randint(-128, 128, (tokens, columns), dtype=torch.int8)
        w = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        exact &= torch.equal(int8_product.matmul(a, w), a.int() @ w.int().T)
    x, y = torch.randn(5, 2, 64), torch.randn(2, 64, 32)
    exact &= torch.allclose(fp32_product.per_head(x, y), torch.einsum("thn,hnr->thr", x, y), atol=1e-4)
    for tokens in (1, 2, 3, 6):
        exact &= _is_exact(False, tokens) and _is_exact(True, tokens)
    inner = {"i8mm": "smmla", "dotprod": "sdot"}[BACKEND.feature]
    instructions = {
        "int8": counted(int8_product.multiply_rows, inner), "token": counted(int8_product.multiply_rows, "sdot"),
        "fp32": counted(fp32_product._per_head, "fmla"),
    }  # fmt: skip
    print(json.dumps({"exact": exact, **instructions}))


if __name__ == "__main__":
    main()
