"""Contracts: an op is a NamedTuple of its operands. Dtypes and shapes are checked before an implementation runs.

    class VUpProj(NamedTuple):
        latent: Annotated[Tensor, "float [T, H, R]"]
        w_uv: Annotated[Tensor, "latent [H, R, V]"]

A type is `float` (fp32, bf16 or fp16), `int` (any integers), `any`, the name of one dtype, or of an earlier field with
that dtype. Sizes of one name are equal; a number is that size; `...` stands for any leading sizes. Fields that are
NamedTuples themselves have their own names. A field marked `WRITTEN` is changed by the op, so no element of it may
repeat another one. `rules`, if there is one, raises `KernelInputError` for what else must fit of shapes, dtypes and
numbers, `check_values` for tensors' values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch

from glm5_kernels.errors import KernelInputError

WRITTEN = "written"
_DTYPES: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "float": ("fp32, bf16 or fp16", (torch.float32, torch.bfloat16, torch.float16)),
    "int": ("integers", (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)),
    "fp32": ("fp32", (torch.float32,)),
    "int8": ("int8", (torch.int8,)),
    "int32": ("int32", (torch.int32,)),
    "int64": ("int64", (torch.int64,)),
    "any": ("", ()),
}


class TensorSpec(NamedTuple):
    """The declared type and shape of a field; `number` is its index in the contract."""

    name: str
    number: int
    kind: str  # a key of `_DTYPES`, or an earlier field
    sizes: tuple[str, ...]
    leading: bool  # any sizes may precede `sizes`
    written: bool  # the op changes the tensor


@cache
def tensor_specs(contract: Any) -> tuple[TensorSpec, ...]:
    """The specs of the tensors among the fields of a contract."""
    specs = []
    for number, (name, hint) in enumerate(get_type_hints(contract, include_extras=True).items()):
        if get_origin(hint) is Annotated:
            _, text, *marks = get_args(hint)
            kind, shape = re.fullmatch(r"(\w+) \[(.*)\]", text).groups()  # type: ignore[union-attr]
            sizes = tuple(size for size in shape.split(", ") if size != "...")
            specs.append(TensorSpec(name, number, kind, sizes, "..." in shape, WRITTEN in marks))
    return tuple(specs)


@cache
def _nested(contract: Any) -> tuple[tuple[str, int], ...]:
    hints = enumerate(get_type_hints(contract).items())
    return tuple((name, number) for number, (name, kind) in hints if hasattr(kind, "_fields"))


#: What `_signature` gives of operands that fit.
_FITTING: set[Any] = set()


def check(operands: Any) -> None:
    """Raise `KernelInputError` unless the operands fit their contract and are on one device.

    Runs before every op of every layer of a decode step: what does not depend on the values of tensors is looked up.
    """
    signature = (type(operands), *map(_signature, operands))
    if signature not in _FITTING:
        _check(operands, "", operands[0].device)
        if len(_FITTING) >= 4096:
            _FITTING.clear()
        _FITTING.add(signature)
    if hasattr(operands, "check_values"):
        operands.check_values()


def _signature(operand: Any) -> Any:
    """Everything of an operand that contracts and their `rules` look at."""
    if isinstance(operand, torch.Tensor):
        return operand.shape, operand.dtype, operand.device, operand.stride()
    if isinstance(operand, tuple):
        return tuple(map(_signature, operand))
    return getattr(operand, "signature", operand)


def _check(operands: Any, prefix: str, device: torch.device | None) -> None:
    contract: Any = type(operands)
    sizes: dict[str, int] = {}
    for name, number, kind, names, leading, written in tensor_specs(contract):
        tensor = operands[number]
        if tensor is None:
            continue
        shape = tensor.shape
        if leading:
            shape = shape[-len(names) :]
        fits = len(shape) == len(names)
        for size, size_name in zip(shape, names, strict=False):
            expected_size = int(size_name) if size_name.isdigit() else size
            fits = sizes.setdefault(size_name, expected_size) == size and fits
        if not fits:
            expected = ["..."] * leading + [str(sizes.get(size_name, "*")) for size_name in names]
            raise _wrong_shape(prefix + name, tensor, expected)
        if kind not in _DTYPES:
            require_same_dtype(prefix + name, tensor, prefix + kind, getattr(operands, kind))
        elif _DTYPES[kind][1] and tensor.dtype not in _DTYPES[kind][1]:
            raise KernelInputError(f"{prefix}{name} is {tensor.dtype}, expected {_DTYPES[kind][0]}")
        if written and 0 in tensor.stride() and _repeats(tensor):
            raise KernelInputError(
                f"{prefix}{name} is written, but its strides {list(tensor.stride())} repeat elements"
            )
        if device is not None and tensor.device != device:
            raise KernelInputError(f"{prefix}{name} is on {tensor.device}, the other arguments are on {device}")
    for name, number in _nested(contract):
        _check(operands[number], f"{name}.", None)
    if hasattr(contract, "rules"):
        operands.rules()


def _repeats(tensor: torch.Tensor) -> bool:
    """True if some elements of an expanded tensor are one in memory."""
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _wrong_shape(name: str, tensor: torch.Tensor, expected: list[str]) -> KernelInputError:
    return KernelInputError(f"{name} has shape {list(tensor.shape)}, expected [{', '.join(expected)}]")


def largest(tensor: torch.Tensor) -> int:
    """The largest of a tensor's integers, -1 if it has none."""
    return int(tensor.max()) if tensor.numel() else -1


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise `KernelInputError` unless the tensor has this shape."""
    if tensor.shape != shape:
        raise _wrong_shape(name, tensor, [str(size) for size in shape])


def require_same_dtype(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise `KernelInputError` unless both tensors have one dtype."""
    if tensor.dtype != other.dtype:
        raise KernelInputError(f"{name} is {tensor.dtype}, {other_name} is {other.dtype}: expected the same")


def contract_name(op: str) -> str:
    """The name of an op's contract: v_up_proj -> VUpProj."""
    return "".join(word.capitalize() for word in op.split("_"))


def op_name(contract: Callable[..., Any]) -> str:
    """The inverse of `contract_name`."""
    return re.sub(r"(?<=.)(?=[A-Z])", "_", contract.__name__).lower()
