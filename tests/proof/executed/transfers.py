"""Copies between GM and UB, from GM to L1 and from L0C to GM.

From AscendNPU-IR v1.2.0, `bishengir/lib/Template`: `lib/DMA/Ubuf/Copy1D.cpp`, `Copy2D.cpp` and `include/DMA/DMAUtils.h`
(load_gm_to_ubuf, store_ubuf_to_gm: whole blocks of 32 bytes are written to UB, the rest of the last one padded; what
is not aligned goes element by element on the scalar pipe), `lib/DMA/Cbuf/nd2nz.cpp`, `set2d.cpp`, `lib/Fixpipe/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.proof.executed.places import View
from tests.proof.executed.steps import Instruction, Step, by_scalar
from tests.proof.executed.text import UncoveredError

BLOCK = 32
#: PadMode of HIVMAttrs.td: Null and Value; FirstElem is not used by our kernels.
PADS = (0, 2)
#: FixpipePreQuantMode of HIVMAttrs.td.
TO_BF16 = 16

Build = Callable[[list[Any]], list[Step]]


def primitive(name: str) -> Build | None:
    """A function from arguments to steps, or None if the name is not a copy."""
    if re.fullmatch(r"load_gm_to_ubuf_[12]d_\w+", name):
        return _load
    if re.fullmatch(r"store_ubuf_to_gm_[12]d_\w+", name):
        return _store
    if re.fullmatch(r"nd2nz_(int8_t|bfloat16_t|half)", name):
        return _to_l1
    if re.fullmatch(r"set_l1_2d_(int8_t|bfloat16_t|half)", name):
        return _fill_l1
    if re.fullmatch(r"fixpipe_nz2nd_(float|int32_t)_to_(float|int32_t|bfloat16_t)_4d_to_2d", name):
        return _from_l0c
    return None


def _rows(view: View) -> tuple[int, int, int]:
    """UB elements as consecutive rows: the number of rows, elements per row, elements between row starts."""
    if len(view.sizes) == 2:
        if view.strides[1] != 1 and view.sizes[1] != 1:
            raise UncoveredError("2-d copy whose rows do not follow each other")
        return view.sizes[0], view.sizes[1], view.strides[0]
    if view.strides[0] == 1:
        return 1, view.sizes[0], view.sizes[0]
    return view.sizes[0], 1, view.strides[0]


def _aligned(ub: View, gm: View) -> bool:
    rows, _, apart = _rows(ub)
    regular = gm.strides[-1] == 1 or (len(gm.sizes) == 1 and (ub.strides[0] != 1 or gm.sizes[0] == 1))
    return ub.start() % BLOCK == 0 and (rows == 1 or apart * ub.item % BLOCK == 0) and regular


def _padded(ub: View) -> View:
    """The UB bytes that are written: each row up to its block's end."""
    rows, length, apart = _rows(ub)
    per_block = BLOCK // ub.item
    whole = -(-length // per_block) * per_block
    return ub.part(ub.offset, (rows, whole), (apart if rows > 1 else whole, 1))


def _load(arguments: list[Any]) -> list[Step]:
    gm, ub, mode, pad, left = arguments[:5]
    if mode not in PADS or left:
        raise UncoveredError("load_gm_to_ubuf with padding on the left or by the first element")
    if not ub.count:
        return []
    if not _aligned(ub, gm):
        return by_scalar("MTE2", Instruction("S", (gm,), (ub,), lambda: _copy(gm, ub)))
    written = _padded(ub)

    def run() -> None:
        rest = np.full(written.sizes, pad if mode == 2 else 0)
        written.write(rest)
        _copy(gm, ub)

    return [Instruction("MTE2", (gm,), (written,), run)]


def _store(arguments: list[Any]) -> list[Step]:
    ub, gm, atomic = arguments[:3]
    if atomic:
        raise UncoveredError("store_ubuf_to_gm with an atomic operation")
    if not ub.count:
        return []
    if _aligned(ub, gm):
        return [Instruction("MTE3", (ub,), (gm,), lambda: _copy(ub, gm))]
    if ub.start() % BLOCK and ub.count * ub.item > BLOCK:
        raise UncoveredError("store_ubuf_to_gm from an address that is no multiple of 32")
    return by_scalar("MTE3", Instruction("S", (ub,), (gm,), lambda: _copy(ub, gm)))


def _copy(source: View, target: View) -> None:
    target.array()[...] = source.array()


def _to_l1(arguments: list[Any]) -> list[Step]:
    """[n, d] of GM as [d1, n1, 16, d0] in L1, d0 of 32 bytes; the rest of the last d0 is zero."""
    gm, l1 = arguments
    rows, columns = gm.sizes
    per_block = BLOCK // gm.item
    blocks = -(-columns // per_block)
    apart = l1.strides[0]
    if (gm.item == 1 and columns < BLOCK) or gm.strides[1] != 1:
        raise UncoveredError("nd2nz of narrow or scattered rows")
    target = l1.part(l1.offset, (blocks, rows, per_block), (apart, per_block, 1))

    def run() -> None:
        whole = np.zeros((rows, blocks * per_block), gm.array().dtype)
        whole[:, :columns] = gm.array()
        target.array()[...] = whole.reshape(rows, blocks, per_block).swapaxes(0, 1)

    return [Instruction("MTE2", (gm,), (target,), run)] if rows and columns else []


def _fill_l1(arguments: list[Any]) -> list[Step]:
    value, l1 = arguments
    return [Instruction("MTE2", (), (l1,), lambda: l1.write(np.full(l1.sizes, value)))]


def _from_l0c(arguments: list[Any]) -> list[Step]:
    """[n1, m1, 16, 16] of L0C to [m, n] of GM."""
    l0c, gm, quant, relu, split, unit_flag = arguments
    if relu or split or unit_flag or (quant == TO_BF16) != (gm.kind == "bf16") or quant not in (0, TO_BF16):
        raise UncoveredError("fixpipe with relu, split, unit flag or another quantization")
    rows, columns = gm.sizes
    blocks = -(-columns // 16)
    source = l0c.part(l0c.offset, (blocks, rows, 16), (l0c.strides[0], 16, 1))

    def run() -> None:
        gm.write(source.read().swapaxes(0, 1).reshape(rows, -1)[:, :columns])

    return [Instruction("FIX", (source,), (gm,), run)] if rows and columns else []
