"""Draws operands that do not fit and runs each in a child: `python -m tests.ops.support.bad_operands OP N [--guard]`.

Compiled code reads memory by address, so a fault ends the child and is a finding. This process is started anew: a fork
of one that has threads may wait forever for a lock of theirs. Prints what is wrong as JSON.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import multiprocessing
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from glm5_kernels import registry
from glm5_kernels.errors import KernelInputError
from glm5_kernels.parity.cases import Case, cases
from glm5_kernels.w4a8_moe import ExpertWeights

register_pytree_node(
    ExpertWeights, lambda weights: (list(weights.blocks), None), lambda blocks, _: ExpertWeights(blocks)
)
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` with its strides, whose last byte is the last one before a protected page."""
    if not tensor.numel():
        return tensor.clone()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = elements * tensor.element_size()
    whole = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, whole + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(start + whole, _PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=elements, offset=whole - size)
    copy = flat.as_strided(tensor.shape, tensor.stride())
    copy.copy_(tensor)
    return copy


class EndedBySignal(Exception):  # noqa: N818 - a fact about the child, not about us
    """The child did not answer."""


def in_child(function: Callable[[], Any]) -> Any:
    """What `function()` returns in a child process.

    Raises:
        EndedBySignal: the child was ended by a signal, or ended itself.
    """
    answers, answer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: answer.send(function()))
    child.start()
    answer.close()
    with suppress(EOFError):
        result = answers.recv()
    child.join()
    if child.exitcode:
        raise EndedBySignal(signal.Signals(-child.exitcode).name if child.exitcode < 0 else f"exit {child.exitcode}")
    return result


#: The smallest variants: a case runs twice in a child.
SMALL = "short and empty", " 1 tokens", " 8 tokens", "size 32", "INT", "64 columns", "[8, 2048]", "[1, 512]"


@cache
def small_cases(op: str) -> list[Case]:
    return [case for case in cases(ops=[op]) if any(word in f" {case.variant}" for word in SMALL)]


def operands(case: Case) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(case.arguments) if isinstance(leaf, torch.Tensor)]


def with_operand(case: Case, number: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The arguments, all copied, with `change` made to one tensor of them."""
    numbers = itertools.count()
    return tree_map_only(
        torch.Tensor, lambda t: change(t.clone()) if next(numbers) == number else t.clone(), case.arguments
    )


def spoiled(t: torch.Tensor, kind: str, index: int) -> torch.Tensor:
    """`t` with one thing changed; some changes are none of the op's business, then both must answer alike."""
    if kind.startswith("dtype "):
        return t.to(getattr(torch, kind[6:]))
    if kind.startswith("value "):
        if not t.numel() or (kind[6:] in ("nan", "inf", "-inf") and not t.is_floating_point()):
            return t
        value = float(kind[6:]) if t.is_floating_point() else int(float(kind[6:]))
        if not t.is_floating_point() and not torch.iinfo(t.dtype).min <= value <= torch.iinfo(t.dtype).max:
            t = t.long()
        t = t.contiguous()
        t.view(-1)[index % t.numel()] = value
        return t
    return {
        "row less": lambda: t[:-1],
        "row more": lambda: torch.cat([t, t[-1:]]) if len(t) else t,
        "column less": lambda: t[..., :-1],
        "column more": lambda: torch.cat([t, t[..., -1:]], -1),
        "transposed": lambda: t.mT if t.dim() > 1 else t,
        "one more dimension": lambda: t[..., None],
        "one dimension less": lambda: t[0] if t.dim() else t,
        "empty": lambda: t[:0],
        "not contiguous": lambda: torch.stack([t, t], -1)[..., 0],
        "behind a guard": lambda: guarded(t),
    }[kind]()


SHAPES = (
    "row less", "row more", "column less", "column more", "transposed", "one more dimension", "one dimension less",
    "empty", "not contiguous", "behind a guard",
)  # fmt: skip
DTYPES = tuple(f"dtype {name}" for name in ("float64", "float32", "bfloat16", "int64", "int32", "int8", "bool"))
VALUES = tuple(
    f"value {value}" for value in ["3", "127", "100000", "2147483647", "4294967299", "-1", "-5", "nan", "inf", "-inf"]
)


def outcome(op: str, implementation: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        output = registry.load(op, implementation)(*arguments)
    except KernelInputError as error:
        return "refused", str(error)
    except Exception as error:  # neither version may answer so
        return type(error).__name__, str(error).splitlines()[:1]
    results = output if isinstance(output, tuple) else () if output is None else (output,)
    return "answered", [torch.as_tensor(result).double().numpy() for result in results]


def compare(case: Case, arguments: tuple[Any, ...]) -> str:
    """Describe what is wrong, or return an empty string."""
    (kind, value), (other, answer) = (
        in_child(lambda i=i: outcome(case.op, i, arguments))  # type: ignore[misc]
        for i in ("reference", "cpu")
    )
    if kind != other or kind not in ("refused", "answered"):
        return f"reference: {kind} {value}, compiled: {other} {answer}"
    if kind == "refused":
        return "" if value == answer else f"{value!r} is not {answer!r}"
    for a, b in zip(map(torch.from_numpy, value), map(torch.from_numpy, answer), strict=True):
        different = ~torch.isclose(a, b, rtol=5e-2, atol=5e-2, equal_nan=True)
        # Positions whose scores are equal but for the last bits may change places.
        if different.double().mean() > (0.02 if case.gap is not None else 0):
            return f"{different.double().mean():.1%} of the numbers differ"
    return ""


#: Their weights are finite by contract: the quantizer refuses others where it reads them.
FINITE = ("ssz_scale", "round_rows", "fake_round", "gptq_inverse_factors", "gptq_round")


def draw(op: str, count: int) -> list[str]:
    """`count` spoiled operands of `op`, the same ones every time; what is wrong, in words."""
    chance, wrong = random.Random(op), []
    kinds = SHAPES + DTYPES + tuple(v for v in VALUES if op not in FINITE or v[6:] not in ("nan", "inf", "-inf"))
    for _ in range(count):
        case = chance.choice(small_cases(op))
        number, kind, index = chance.randrange(len(operands(case))), chance.choice(kinds), chance.randrange(10**6)
        try:
            arguments = with_operand(case, number, lambda t, kind=kind, index=index: spoiled(t, kind, index))  # type: ignore[misc]
        except KernelInputError:  # the weights of experts are checked when they are made
            continue
        try:
            differences = compare(case, arguments)
        except EndedBySignal as ended:
            differences = f"ended by {ended}"
        if differences:
            wrong.append(f"{op} ({case.variant}), operand {number}, {kind}: {differences}")
    return wrong


def behind(op: str) -> list[str]:
    """Cases of `op` that touch what lies behind an operand, or answer otherwise with such operands."""
    wrong = []
    for case in (case for case in cases(ops=[op]) if "prefill" not in case.variant):

        def answers(case: Case = case) -> bool:
            plain = outcome(op, "cpu", tree_map_only(torch.Tensor, torch.clone, case.arguments))
            ends = outcome(op, "cpu", tree_map_only(torch.Tensor, guarded, case.arguments))
            pairs = zip(plain[1], ends[1], strict=True)
            return plain[0] == ends[0] == "answered" and all(((a == b) | ((a != a) & (b != b))).all() for a, b in pairs)

        try:
            if not in_child(answers):
                wrong.append(f"{op} ({case.variant}): other results")
        except EndedBySignal as ended:
            wrong.append(f"{op} ({case.variant}): ended by {ended}")
    return wrong


def read_behind() -> str:
    """That the guard bites."""
    end = guarded(torch.zeros(10))
    try:
        in_child(lambda: ctypes.string_at(end.data_ptr() + 40, 1))
    except EndedBySignal as ended:
        return str(ended)
    return "nothing happened"


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, count = sys.argv[1], int(sys.argv[2])
    wrong = draw(name, count) + (behind(name) if "--guard" in sys.argv else [])
    print(json.dumps({"wrong": wrong, "guard": read_behind()}))
