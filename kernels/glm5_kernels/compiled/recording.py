"""A step of a model recorded once, and repeated without the Python code that made its calls.

A recording has every call of a kernel, with its operands, and every operator of torch, in their order. To repeat it
costs a tenth of a microsecond for a kernel instead of some thirty. It works on the tensors of the recorded step, so the
caller writes new inputs into the tensors that the step read. Python code must not depend on values of tensors: a step
with an operator that reads one runs to its end, and has an `obstacle`. What numpy computes is not seen: `repeated`
decorates it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.dispatcher import Dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm5_kernels.compiled import threads
from glm5_kernels.compiled.simd import I64
from glm5_kernels.errors import NotRecordableError

F = TypeVar("F", bound=Callable[..., Any])


class Recording(TorchDispatchMode):
    """The calls within `with recording:`, one after the other; `repeat` runs them again.

    The operands of kernels are never freed: a process should make few recordings.

    Attributes:
        obstacle: why the calls cannot be repeated; "" if they can.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Callable[[], object]] = []
        self._kernels: list[tuple[int, int, int, int]] = []  # since the last operator
        self._kept: list[Any] = []  # kernels have the addresses of tensors
        self._results: dict[Any, Any] = {}  # of Python functions
        self._paused, self.obstacle = False, ""

    def __enter__(self) -> Recording:
        threads.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        threads.recorder = None
        self._end_kernels()

    def repeat(self) -> None:
        """Run all recorded calls again, on the same tensors.

        Raises:
            NotRecordableError: there is an obstacle, or a result has another shape now.
        """
        if self.obstacle:
            raise NotRecordableError(self.obstacle)
        for call in self._calls:
            call()

    def add_kernel(self, function: Any, count: int, size: int, operands: tuple[Any, ...]) -> None:
        """Record a call for tasks 0 .. count - 1; the caller makes the call itself."""
        if isinstance(function, Dispatcher) and not self._paused:
            self._kept.append(operands)
            self._kernels.append((*threads.specialized(_keep, function)(*operands), count, size))
        elif not self._paused:
            self.obstacle = f"{function.__qualname__} is no kernel"

    def add_python(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function whose own calls are not recorded; `repeat` calls it again, once for equal arguments."""
        if self._paused:
            return function(*arguments, **keywords)
        key = function, *map(id, tree_leaves((arguments, keywords)))
        if key in self._results:
            return self._results[key]
        self._paused = True
        try:
            results = function(*arguments, **keywords)
        finally:
            self._paused = False
        self._kept.append((arguments, keywords, results))
        if _tensors(results):
            self._results[key] = results
        self._add(_copying(partial(function, *arguments, **keywords), results))
        return results

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if self._paused:
            return func(*args, **keywords)
        if _depends_on_values(func, args):
            self.obstacle = f"the result of {func} depends on values"
        results = func(*args, **keywords)
        self._kept.append((args, keywords, results))
        if func._schema.is_mutable:
            self._add(partial(func, *args, **keywords))
        elif func.overloadpacket not in _ALLOCATIONS and not _is_view(func, results, (args, keywords)):
            self._add(_into(func, args, keywords, results))
        return results

    def _add(self, call: Callable[[], object]) -> None:
        self._end_kernels()
        self._calls.append(call)

    def _end_kernels(self) -> None:
        if self._kernels:
            calls = np.array(self._kernels, np.int64)
            self._calls.append(lambda: threads.team(os.getpid()).run_calls(calls))
            self._kernels = []


_ALLOCATIONS = {
    torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}  # fmt: skip


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func.overloadpacket is torch.ops.aten.index:  # by masks or by numbers
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_view(func: Any, results: Any, arguments: Any) -> bool:
    """True if an operator of torch only looks at its arguments; others may write there without saying so."""
    return func.namespace == "aten" and _memory(results) <= _memory(arguments)


def _memory(values: Any) -> set[int]:
    """Addresses of the tensors' memory, which a view shares with its base."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(values)}


def _into(func: Any, args: tuple[Any, ...], keywords: dict[str, Any], results: Any) -> Callable[[], object]:
    """The call of an operator that writes its results where they are now."""
    if func in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default):
        return partial(results.copy_, args[0])
    taken = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, overload)
        all_taken = [(argument.name, str(argument.type)) for argument in variant._schema.arguments]
        out = [argument.name for argument in variant._schema.arguments if argument.is_out]
        if out and taken == all_taken[: -len(out)]:
            targets = [results] if isinstance(results, torch.Tensor) else results
            return partial(variant, *args, **keywords, **dict(zip(out, targets, strict=True)))
    return _copying(partial(func, *args, **keywords), results)


def _copying(call: Callable[[], Any], results: Any) -> Callable[[], object]:
    """The call, whose results are copied to where they are now."""
    targets = _tensors(results)

    def run() -> None:
        for target, result in zip(targets, _tensors(call()), strict=True):
            if target.shape != result.shape:
                raise NotRecordableError(f"a result has shape {list(result.shape)}, had {list(target.shape)}")
            target.copy_(result)

    return run if targets else call


def repeated(function: F) -> F:
    """Decorator of a function that reads values or computes in numpy: a recording calls it each time, as Python."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        if threads.recorder is None:
            return function(*arguments, **keywords)
        return threads.recorder.add_python(function, arguments, keywords)

    return run  # type: ignore[return-value]


def _keep(*operands: Any) -> tuple[int, int]:
    return _kept_job(function, operands)  # type: ignore[no-any-return] # noqa: F821 - a global of each copy


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _kept_job(typing: Any, function: Any, operands: Any) -> Any:
    """(address of the kernel's `task_code`; address of the operands, which are never freed)."""
    code = threads.task_code(typing, function, operands)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = context.get_value_type(operands)
        memory = context.nrt.allocate(builder, ir.Constant(I64, context.get_abi_sizeof(kind)))
        builder.store(values[1], builder.bitcast(memory, kind.as_pointer())).align = 1
        context.nrt.incref(builder, operands, values[1])
        return context.make_tuple(
            builder, signature.return_type, [code(context, builder), builder.ptrtoint(memory, I64)]
        )

    return types.UniTuple(types.int64, 2)(function, operands), generate
