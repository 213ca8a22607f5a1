"""Level 1: Triton's interpreter (3.9), with two of its errors in bf16 corrected.

It holds a bf16 value as the number of its bits. `tl.dot` multiplies those numbers; a conversion from fp32 cuts the
lower half off instead of rounding. Both are wrong for every device, so they are mended here and nowhere else;
test_levels asserts that they are still there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_builder = interpreter.InterpreterBuilder
_dot, _cast = _builder.create_dot, _builder.cast_impl


def _widened(handle: Any) -> Any:
    """A bf16 value is the upper half of the fp32 value with the same bits."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot_of_values(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), d, *rest)


def _cast_to_nearest(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, source, target)
    bits = source.data.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even; no NaN is converted in our kernels
    return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)


def correct() -> None:
    """Mend both, for this process."""
    _builder.create_dot, _builder.cast_impl = _dot_of_values, _cast_to_nearest
