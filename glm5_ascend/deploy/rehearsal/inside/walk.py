"""Which operators a step calls, in order, with shapes and types; nothing is computed.

Large tensors have no memory, so torch_npu's own Meta kernels answer with shapes and refuse what they would refuse on an
NPU. For an operator that has none there is one of ours in `operators`. Values that the host looks at are made up: every
expert gets as many tokens as every other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .meta import REAL_ELEMENTS, BigOnMeta
from .operators import OURS

#: Operators of Python that are registered for an NPU alone: name -> function.
PYTHON: dict[str, Callable[..., Any]] = {}
_SHORT = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16", torch.int8: "i8", torch.int32: "i32"}
_SHORT |= {torch.int64: "i64", torch.uint8: "u8", torch.bool: "b"}
#: No work on a device, or only bookkeeping.
_SILENT = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::alias")


def remember_python_operators() -> None:
    """Keep what is registered in the library `vllm` from now on. Before anything of vLLM is imported."""
    register: Any = torch.library.Library.impl

    def impl(library: Any, name: Any, function: Any, *rest: Any, **named: Any) -> Any:
        if library.ns == "vllm" and isinstance(name, str):
            PYTHON[name] = function
        return register(library, name, function, *rest, **named)

    torch.library.Library.impl = impl  # type: ignore[method-assign,assignment]


class OperatorWalk(TorchDispatchMode):
    """Notes every operator.

    Attributes:
        lines: `namespace::name(what went in) -> what came out`, in order.
        ours: operators that were answered by us.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.ours: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), function._schema.name
        space, _, short = name.partition("::")
        if space == "vllm" and short in PYTHON and name not in OURS:
            with BigOnMeta(), self:  # both are off while one of their operators runs
                return PYTHON[short](*args, **given)
        if space == "c10d":
            answer = _as_if_sent(function, args)
        elif name == "aten::histc" and args[0].is_meta:
            answer = _evenly(args[0].numel(), given.get("bins", args[1] if len(args) > 1 else 100))
        else:
            answer = self._on_meta(function, name, args, _placed(function, args, given))
        if not (function.is_view or name.startswith(_SILENT)):
            self.note(name, (args, given), answer)
        return answer

    def _on_meta(self, function: Any, name: str, args: Any, given: dict[str, Any]) -> Any:
        """Where one tensor has no memory, none has: copies of the small real ones go in, and come back as they were."""
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if name.startswith("aten::") and not any(tensor.is_meta for tensor in tensors):
            return function(*args, **given)
        copies = {id(tensor): tensor.to("meta") for tensor in tensors if not tensor.is_meta}
        args, given = tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, given))
        if name in OURS:
            self.ours.add(name)
            answer = OURS[name](*args, **given)
        else:
            answer = function(*args, **given)
        originals = {id(copy): tensor for tensor in tensors if (copy := copies.get(id(tensor))) is not None}
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), answer)

    def note(self, name: str, inputs: Any, outputs: Any) -> None:
        self.lines.append(f"{name}({shapes(inputs)}) -> {shapes(outputs) or '()'}")


def shapes(tree: Any) -> str:
    """`bf16[8,6144], i8[3]` of all tensors in it."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return ", ".join(f"{_SHORT.get(t.dtype, str(t.dtype)[6:])}{list(t.shape)}".replace(" ", "") for t in tensors)


def _placed(function: Any, args: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A device that is not here: large tensors get no memory, small ones are real; what has none stays without."""
    if given.get("device") is None:
        return given
    source = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if source is not None and "copy" in function._schema.name:
        device = source.device
    else:
        sizes = [argument for argument in args[:2] if isinstance(argument, list | tuple | torch.Size)]
        large = bool(sizes) and torch.Size(sizes[0]).numel() > REAL_ELEMENTS
        device = torch.device("meta" if large or torch.device(given["device"]).type == "meta" else "cpu")
    return given | {"device": device, **({"pin_memory": False} if given.get("pin_memory") else {})}


def _as_if_sent(function: Any, args: Any) -> Any:
    """A collective of one process: each output is as it was, but counts that are gathered are those of this rank."""
    from torch._C._distributed_c10d import FakeWork

    first, second = args[0], args[1]
    if "allgather_base" in function._schema.name and not first.is_meta and not second.is_meta:
        first.view(-1, *second.shape).copy_(second.expand(first.numel() // second.numel(), *second.shape))
    work = FakeWork().boxed()
    returns = [str(result.type) for result in function._schema.returns]
    answers = [work if "Work" in kind else first for kind in returns]
    return answers[0] if len(answers) == 1 else tuple(answers)


def _evenly(total: int, bins: int) -> torch.Tensor:
    counts = torch.full((bins,), total // bins, dtype=torch.int32)
    counts[: total % bins] += 1
    return counts


def table(lines: list[str]) -> dict[str, Any]:
    """The same lines once each, and their order."""
    numbers: dict[str, int] = {}
    order = [numbers.setdefault(line, len(numbers)) for line in lines]
    return {"operators": list(numbers), "order": order}


class Nothing:
    """A stream, an event, and what they give: all there is to wait for is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Nothing]:
        return lambda *_, **__: self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def without_streams() -> None:
    """No device, no streams."""
    for name in ("Stream", "Event"):
        setattr(torch.npu, name, Nothing)  # type: ignore[attr-defined]
    for name in ("current_stream", "stream", "synchronize", "default_stream"):
        setattr(torch.npu, name, Nothing)  # type: ignore[attr-defined]
