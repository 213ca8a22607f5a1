"""What the compiler makes of two inner loops for NUMBA_CPU_NAME; prints counts as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from glm5_kernels.compiled import fp32_product, int8_dots


def counted(function: Any) -> dict[str, int]:
    """Instructions in everything that was compiled of one function; calls: of another one, numba's entry left out."""
    text = "\n".join(function.inspect_asm().values())
    names = {"sdot": r"\tsdot\t", "mul": r"\t(?:s?mull?2?|mla)\t", "fmla": r"\tfml[as]\t"}
    inner = text.split("cfunc.")[0]
    found = {name: len(re.findall(pattern, text)) for name, pattern in names.items()}
    return found | {"calls": len(re.findall(r"\tbl\t(?!.*(?:NRT|numba|Err|alloc))", inner))}


def main() -> None:
    exact = True
    for tokens, rows, columns in ((7, 70, 256), (1, 3, 64), (33, 9, 128)):
        a = torch.randint(-128, 128, (tokens, columns), dtype=torch.int8)
        w = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        exact &= torch.equal(int8_dots.matmul(a, w), a.int() @ w.int().T)
    x, y = torch.randn(5, 2, 64), torch.randn(2, 64, 32)
    exact &= torch.allclose(fp32_product.per_head(x, y), torch.einsum("thn,hnr->thr", x, y), atol=1e-4)
    print(json.dumps({"exact": exact, "int8": counted(int8_dots.rows), "fp32": counted(fp32_product._per_head)}))


if __name__ == "__main__":
    main()
