"""Contracts: an op is a NamedTuple of its operands. Dtypes and shapes are checked before an implementation runs.

    class VUpProj(NamedTuple):
        latent: Annotated[Tensor, "float [T, H, R]"]
        w_uv: Annotated[Tensor, "float [H, R, V]"]

A type is `float` (fp32, bf16 or fp16), `int` (any integers), `any`, or the name of one dtype. Sizes of one name are
equal; a number is that size; `...` stands for any leading sizes. Fields that are NamedTuples themselves have their own
names. A field marked `WRITTEN` is changed by the op. `rules`, if there is one, raises `KernelInputError` for what else
must fit.
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
    """The declared type and shape of a field.

    Attributes:
        number: of the field.
        dtype: a key of `_DTYPES`.
        sizes: names or numbers; `leading` if any sizes may precede them.
        written: the op changes the tensor.
    """

    name: str
    number: int
    dtype: str
    sizes: tuple[str, ...]
    leading: bool
    written: bool


@cache
def tensor_specs(contract: Any) -> tuple[TensorSpec, ...]:
    """The specs of the tensors among the fields of a contract."""
    specs = []
    for number, (name, hint) in enumerate(get_type_hints(contract, include_extras=True).items()):
        if get_origin(hint) is Annotated:
            _, text, *marks = get_args(hint)
            dtype, shape = re.fullmatch(r"(\w+) \[(.*)\]", text).groups()  # type: ignore[union-attr]
            sizes = tuple(size for size in shape.split(", ") if size != "...")
            specs.append(TensorSpec(name, number, dtype, sizes, "..." in shape, WRITTEN in marks))
    return tuple(specs)


@cache
def _nested(contract: Any) -> tuple[tuple[str, int], ...]:
    hints = enumerate(get_type_hints(contract).items())
    return tuple((name, number) for number, (name, kind) in hints if hasattr(kind, "_fields"))


def check(operands: Any) -> None:
    """Raise `KernelInputError` unless the operands fit their contract and are on one device."""
    _check(operands, "", operands[0].device.type)


def _check(operands: Any, prefix: str, device: str | None) -> None:
    contract: Any = type(operands)
    sizes = {"1": 1}
    for spec in tensor_specs(contract):
        tensor = operands[spec.number]
        if tensor is None:
            continue
        shape = tensor.shape[-len(spec.sizes) :] if spec.leading else tensor.shape
        fits = len(shape) == len(spec.sizes)
        for size, name in zip(shape, spec.sizes, strict=False):
            fits = sizes.setdefault(name, size) == size and fits
        if not fits:
            expected = ["..."] * spec.leading + [str(sizes.get(name, "*")) for name in spec.sizes]
            raise _wrong_shape(prefix + spec.name, tensor, expected)
        words, dtypes = _DTYPES[spec.dtype]
        if dtypes and tensor.dtype not in dtypes:
            raise KernelInputError(f"{prefix}{spec.name} is {tensor.dtype}, expected {words}")
        if device is not None and tensor.device.type != device:
            raise KernelInputError(f"{prefix}{spec.name} is on {tensor.device}, the other arguments are on {device}")
    for name, number in _nested(contract):
        _check(operands[number], f"{name}.", None)
    if hasattr(contract, "rules"):
        operands.rules()


def _wrong_shape(name: str, tensor: torch.Tensor, expected: list[str]) -> KernelInputError:
    return KernelInputError(f"{name} has shape {list(tensor.shape)}, expected [{', '.join(expected)}]")


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


def checked(contract: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes operands, as a function of the fields of its contract that checks them."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        operands = contract(*arguments, **keywords)
        check(operands)
        return function(operands)

    return run
