"""Products by AMX: the results, the same bits by vectors, and torch's own AMX products still work next to them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from numba import njit

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.processor import restricted_to
from tests.support.command import environment

needs_amx = pytest.mark.skipif(not amx.AMX, reason="this processor has no AMX")


def runner(multiply: Any) -> Any:
    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def run(left: Any, right: Any, out: Any, steps: Any, fresh: Any) -> None:
        amx.configure()
        multiply(left, right, out, steps, fresh)
        amx.release()

    return run


BY_VECTORS, CHOSEN = runner(amx.product_with(amx.Bf16Vectors)), runner(amx.multiply)
INTEGERS_BY_VECTORS, INTEGERS = runner(amx.product_with(amx.Int8Vectors)), runner(amx.multiply_integers)


def product(run: Any, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, fresh: int) -> torch.Tensor:
    """out <- left [32, K] or its two terms [32, 2, K] times right [32, K] transposed."""
    row, together = left.itemsize * left.shape[-1], 4 // left.itemsize
    parts, steps = 1 if left.dim() == 2 else left.shape[1], row // (4 * TILE)
    columns = right.view(2, TILE, -1, together).transpose(1, 2).contiguous()  # [tile, pair or four, column, 2 or 4]
    run(
        LeftAt(left.data_ptr(), parts * row, TILE * parts * row, parts, row),
        RightAt(columns.data_ptr(), 4 * TILE, columns[0].nbytes, 4 * TILE * TILE),
        OutAt(out.data_ptr(), 4 * SIDE, 4 * SIDE * TILE), steps, fresh,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("steps", [1, 4, 18])
@pytest.mark.parametrize("run", [BY_VECTORS, CHOSEN], ids=["by vectors", "as here"])
def test_products_and_sums_of_products(run: Any, steps: int) -> None:
    """Whole numbers: exact, whatever the order."""
    one, two, right = (torch.randint(-9, 10, (SIDE, SIDE * steps)).bfloat16() for _ in range(3))
    out, expected = torch.full((SIDE, SIDE), 7.0), one.float() @ right.float().T
    assert torch.equal(product(run, one, right, out, 1), expected)
    assert torch.equal(product(run, one, right, out, 0), 2 * expected)
    both = torch.stack([one, two], dim=1)
    assert torch.equal(product(run, both, right, out, 1), expected + two.float() @ right.float().T)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("run", [INTEGERS_BY_VECTORS, INTEGERS], ids=["by vectors", "as here"])
def test_products_of_integers(run: Any, steps: int) -> None:
    left, right = (torch.randint(-128, 128, (SIDE, 64 * steps), dtype=torch.int8) for _ in range(2))
    left[3], right[7] = -128, -128
    out, expected = torch.full((SIDE, SIDE), 7, dtype=torch.int32), left.int() @ right.int().T
    assert torch.equal(product(run, left, right, out, 1), expected)
    assert torch.equal(product(run, left, right, out, 0), 2 * expected)


@needs_amx
def test_vectors_give_the_same_bits() -> None:
    """Numbers of any size, infinities and NaN."""
    left, right = (
        torch.randn(SIDE, 128).bfloat16(),
        (torch.randn(SIDE, 128) * 2.0 ** torch.randint(-40, 40, ())).bfloat16(),
    )
    left[3, 5], left[20, 1], right[9, 5], right[31, 77] = float("inf"), float("-inf"), 0.0, float("nan")
    got, want = (product(run, left, right, torch.empty(SIDE, SIDE), 1) for run in (CHOSEN, BY_VECTORS))
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().any()
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))


@needs_amx
def test_beside_products_of_torch_in_several_threads() -> None:
    """torch multiplies bf16 by AMX, too: neither leaves the other registers of a wrong shape."""
    left, right = (torch.randint(-9, 10, (SIDE, 64)).bfloat16() for _ in range(2))
    wide = torch.randint(-3, 4, (80, 96)).bfloat16()
    expected, wide_wanted = left.float() @ right.float().T, (wide.float() @ wide.float().T).bfloat16()

    def alternate(_: int) -> bool:
        ours = [product(CHOSEN, left, right, torch.empty(SIDE, SIDE), 1) for _ in range(3) if (wide @ wide.T).any()]
        return all(torch.equal(x, expected) for x in ours) and torch.equal(wide @ wide.T, wide_wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(alternate, range(200)))


def test_a_lesser_processor_has_none() -> None:
    code = "from glm5_kernels.compiled.amx import AMX; print(AMX)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment() | restricted_to("skylake-avx512"),
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("run", "has", "dtype", "instruction"),
    [(CHOSEN, amx.AMX, torch.bfloat16, "tdpbf16ps"), (INTEGERS, amx.AMX_INT8, torch.int8, "tdpbssd")],
)
def test_the_instructions_are_the_processors_own(run: Any, has: bool, dtype: torch.dtype, instruction: str) -> None:
    if not has:
        pytest.skip("this processor has no such instruction")
    ones = torch.ones(SIDE, 64, dtype=dtype)
    product(run, ones, ones, torch.empty(SIDE, SIDE, dtype=torch.float32 if run is CHOSEN else torch.int32), 1)
    text = "".join(run.inspect_asm().values())
    assert text.count(instruction) >= 4 and "ldtilecfg" in text and "tilerelease" in text
