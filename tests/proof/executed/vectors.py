"""Primitives of the vector pipe.

From AscendNPU-IR v1.2.0, `bishengir/lib/Template/lib/Vector`: Elementwise/EltWise1D.cpp and 2D, CmpSel/Cmp1D.cpp and
Sel1D.cpp, Cast/Cast1D.cpp, Broadcast/*, Reduction/*, Arange/Arange1D.cpp, Interleave/, Deinterleave/; DMA/Ubuf for
copy_ubuf_to_ubuf. Each reads its operands and then writes, as one instruction; what a library function does inside
(its barriers, its scalar tails) is not looked at. exp, log and division are numpy's, sums add in numpy's order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.proof.executed.places import Bytes, FaultError, View
from tests.proof.executed.steps import Instruction, Step
from tests.proof.executed.text import UncoveredError

Build = Callable[[list[Any]], list[Step]]
#: Bytes of one repeat: a comparison writes the bits of whole repeats.
REPEAT = 256

_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "vadd": np.add, "vsub": np.subtract, "vmul": np.multiply, "vdiv": np.divide, "vmax": np.maximum,
    "vmin": np.minimum,
}  # fmt: skip
_ONE: dict[str, Callable[[Any], Any]] = {
    "vabs": np.abs, "vexp": np.exp, "vln": np.log, "vnot": np.invert, "vsqrt": np.sqrt,
    "vrelu": lambda a: np.maximum(a, 0), "vrec": lambda a: np.float32(1) / a,
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_REDUCE: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
#: CastMode of CastUtils.h: to nearest even, away from zero, down, up, to zero.
_ROUND: dict[int, Callable[[Any], Any]] = {
    0: np.rint, 1: lambda a: np.trunc(a + np.copysign(0.5, a)), 2: np.floor, 3: np.ceil, 4: np.trunc,
}  # fmt: skip


def primitive(name: str) -> Build | None:
    """A function from arguments to steps, or None if the name is not a vector primitive."""
    for pattern, build in _TABLE:
        match = re.fullmatch(pattern, name)
        if match:
            return build(*match.groups())
    return None


def _steps(inputs: list[View], output: View, function: Callable[[], Any], temporary: list[Any]) -> list[Step]:
    """One instruction; `temporary` holds nothing or the buffer that the library writes in between."""
    written = [output, *(view for view in temporary if view.count)]
    for view in written:
        for other in (*inputs, *(w for w in written if w is not view)):
            _no_overlap(view, other, view is output and other in inputs)

    def run() -> None:
        with np.errstate(all="ignore"):
            output.write(function())

    return [Instruction("V", tuple(inputs), tuple(written), run)]


def _no_overlap(view: View, other: View, in_place: bool) -> None:
    """A result may only lie on an operand if it starts there and is no wider."""
    if not view.count or not other.count or view.space is not other.space:
        return
    first, last = _span(view)
    start, end = _span(other)
    if first < end and start < last and not (in_place and first == start and last <= end):
        raise FaultError(f"operands lie on each other: {first} to {last} and {start} to {end}")


def _span(view: View) -> tuple[int, int]:
    start = view.start()
    if view.kind == "i1":
        return start, start + -(-view.sizes[0] // 8)
    return start, start + view.item * (1 + sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True)))


def _elementwise(name: str) -> Build:
    function, count = (_TWO[name], 2) if name in _TWO else (_ONE[name], 1)

    def build(arguments: list[Any]) -> list[Step]:
        operands, (to, *temporary) = arguments[:count], arguments[count:]
        return _steps(operands, to, lambda: _whole(function(*(view.read() for view in operands)), to), temporary)

    return build


def _with_scalar(name: str, order: str) -> Build:
    function = _TWO[name if name in _TWO else name.removesuffix("s")]

    def build(arguments: list[Any]) -> list[Step]:
        first, second, to, *temporary = arguments
        a, number = (first, second) if order == "vs" else (second, first)

        def run() -> Bytes:
            values = a.read()
            other = values.dtype.type(number)
            return _whole(function(values, other) if order == "vs" else function(other, values), to)

        return _steps([a], to, run, temporary)

    return build


def _whole(values: Any, to: View) -> Bytes:
    return np.broadcast_to(values, to.sizes)


def _compare(scalar: str, name: str) -> Build:
    def build(arguments: list[Any]) -> list[Step]:
        a, b, to = arguments
        per_repeat = REPEAT // a.item
        count = -(-a.sizes[0] // per_repeat) * per_repeat
        whole = to.part(to.offset, (count,), (1,))

        def run() -> Bytes:
            bits = np.zeros(count, bool)
            bits[: a.sizes[0]] = _COMPARE[name](a.read(), a.read().dtype.type(b) if scalar else b.read())
            return bits

        return _steps([a] if scalar else [a, b], whole, run, [])

    return build


def _select(_: str) -> Build:
    def build(arguments: list[Any]) -> list[Step]:
        condition, x, y, to, *temporary = arguments
        if condition.kind != "i1":
            raise UncoveredError("vsel by bytes")
        inputs = [view for view in (condition, x, y) if isinstance(view, View)]

        def run() -> Bytes:
            choice = [part.read() if isinstance(part, View) else part for part in (x, y)]
            return np.where(condition.read(), *choice)

        return _steps(inputs, to, run, temporary)

    return build


def _cast(source: str, target: str, how: str) -> Build:
    def build(arguments: list[Any]) -> list[Step]:
        a, to, *temporary, mode = arguments

        def run() -> Bytes:
            values = a.read()
            if how == "overflow" or source == "bool":  # low bits; zeros and ones
                return values
            if target.startswith("int") and values.dtype.kind == "f":
                most = np.iinfo(to.array().dtype)
                clean = np.nan_to_num(_ROUND[mode](values.astype(np.float64)), nan=0.0)
                return np.clip(clean, most.min, most.max).astype(np.int64)
            if mode != 0:
                raise UncoveredError(f"vcast {source} to {target} by mode {mode}")
            return values

        return _steps([a], to, run, temporary)

    return build


def _fill(arguments: list[Any]) -> list[Step]:
    value, to = arguments
    return _steps([], to, lambda: np.full(to.sizes, value), [])


def _reduce(name: str, axes: str) -> Build:
    def build(arguments: list[Any]) -> list[Step]:
        a, to, *temporary, _ = arguments
        axis = axes.index("r")
        return _steps([a], to, lambda: _REDUCE[name].reduce(a.read(), axis=axis, keepdims=True), temporary)

    return build


def _channel(number: str) -> Build:
    def build(arguments: list[Any]) -> list[Step]:
        a, to = arguments
        if a.sizes[0] != 2 * to.sizes[0]:
            raise UncoveredError("deinterleave by strides")
        return _steps([a], to, lambda: a.read()[int(number) :: 2], [])

    return build


def _interleave(arguments: list[Any]) -> list[Step]:
    a, b, to, *temporary = arguments
    return _steps([a, b], to, lambda: np.stack([a.read(), b.read()], axis=1).reshape(-1), temporary)


_NAMES = r"int8_t|int16_t|int32_t|half|float|bfloat16_t"
_TABLE: list[tuple[str, Callable[..., Build]]] = [
    (rf"({'|'.join(_TWO)})_[123]d_(?:bool|{_NAMES})", _elementwise),
    (rf"(vadds|vmuls|vmaxs|vmins|vsub|vdiv)_(vs|sv)_1d_(?:{_NAMES})", _with_scalar),
    (rf"({'|'.join(_ONE)})_1d_(?:bool|{_NAMES})", _elementwise),
    (rf"vcmp(s?)_({'|'.join(_COMPARE)})_1d_(?:{_NAMES})", _compare),
    (rf"vsel_(vv_1d_bool|vs_1d|sv_1d|ss_1d)_(?:{_NAMES})", _select),
    (rf"vcast_(bool|{_NAMES})_to_({_NAMES})_1d_with_(mode|temp|overflow)", _cast),
    (rf"broadcast_scalar_(?:{_NAMES})_to_1d", lambda: _fill),
    (rf"(?:enablevcg?_)?reduce_(sum|max|min)_(r|ar|ra|ara)_(?:{_NAMES})", _reduce),
    (rf"deinterleave_channel_([01])_from_2_channels_1d_(?:{_NAMES})", _channel),
    (rf"interleave_1d_(?:{_NAMES})", lambda: _interleave),
]
