"""Whether Triton's interpreter still gets bf16 wrong, before and after `interpreter.correct`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.proof import interpreter


@triton.jit
def multiply(a, b, product, rounded, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    index = i[:, None] * SIZE + i[None, :]
    total = tl.dot(tl.load(a + index), tl.load(b + index))
    tl.store(product + index, total)
    tl.store(rounded + index, total.to(tl.bfloat16))


def report() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    product, rounded = torch.empty(16, 16), torch.empty(16, 16).bfloat16()
    multiply[(1,)](a, b, product, rounded, SIZE=16)
    right = torch.allclose(product, a.float() @ b.float(), atol=1e-4)
    print("product" if right else "product wrong")
    print("rounding" if torch.equal(rounded, product.bfloat16()) else "rounding wrong")


if __name__ == "__main__":
    report()
    interpreter.correct()
    print("corrected:")
    report()
