"""Level 1: Triton's interpreter (3.9), with two of its errors in bf16 corrected.

It holds a bf16 value as the number of its bits. `tl.dot` multiplies those numbers; a conversion from fp32 cuts the
lower half off instead of rounding. Both are wrong for every device, so they are corrected here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_builder = interpreter.InterpreterBuilder
_dot, _cast, _reduce = _builder.create_dot, _builder.cast_impl, interpreter.ReduceOps.generic_reduce


def _widened(handle: Any) -> Any:
    """A bf16 value is the upper half of the fp32 value with the same bits."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = np.asarray(handle.data, np.uint16).astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _dot_of_values(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), d, *rest)


def _cast_to_nearest(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, source, target)
    bits = np.ascontiguousarray(source.data).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nearest = np.where(np.isnan(source.data), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return interpreter.TensorHandle(nearest, tl.bfloat16)


def _reduce_by_slices(self: Any, values: tuple[Any, ...]) -> Any:
    """One tensor along an axis, by a function of our own: slice by slice. Triton's goes element by element, which takes
    minutes; the order of what is combined is the same."""
    if len(values) != 1 or self.axis is None:
        return _reduce(self, values)
    (value,) = values
    first, *rest = np.moveaxis(value.handle.data, self.axis, 0)
    total = self.to_tensor(first, value.dtype)
    for values_of_slice in rest:
        total = self.combine_fn.fn(total, self.to_tensor(values_of_slice, value.dtype))
    reduced = total.handle.data.reshape(first.shape)
    return [self.to_tensor(np.expand_dims(reduced, self.axis) if self.keep_dims else reduced, value.dtype)]


def correct() -> None:
    """Correct both errors and speed up reductions, for this process."""
    _builder.create_dot, _builder.cast_impl = _dot_of_values, _cast_to_nearest
    interpreter.ReduceOps.generic_reduce = _reduce_by_slices
