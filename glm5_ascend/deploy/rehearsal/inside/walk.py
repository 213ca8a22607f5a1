"""Records the operators that a step calls, in order, with shapes and types. Nothing is computed.

Large tensors are meta tensors, so torch_npu's Meta kernels return shapes and refuse what they refuse on an NPU.
Operators without a Meta kernel have a stand-in in `operators`. Values that the host reads are made up: every expert
gets the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .meta import REAL_ELEMENTS, BigOnMeta
from .operators import OURS

#: Python operators that are registered for an NPU only: name -> function.
PYTHON: dict[str, Callable[..., Any]] = {}
_SHORT = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16", torch.int8: "i8", torch.int32: "i32"}
_SHORT |= {torch.int64: "i64", torch.uint8: "u8", torch.bool: "b"}
#: No work on a device, or only bookkeeping.
_SILENT = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::alias")


def remember_python_operators() -> None:
    """Record the functions that are registered in the library `vllm` from now on. Call before importing vLLM."""
    register: Any = torch.library.Library.impl

    def impl(library: Any, name: Any, function: Any, *rest: Any, **named: Any) -> Any:
        if library.ns == "vllm" and isinstance(name, str):
            PYTHON[name] = function
        return register(library, name, function, *rest, **named)

    torch.library.Library.impl = impl  # type: ignore[method-assign,assignment]


class OperatorWalk(TorchDispatchMode):
    """Records every operator.

    Attributes:
        lines: `namespace::name(inputs) -> outputs`, in order.
        ours: operators that ran as stand-ins.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.ours: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords, name = dict(kwargs or {}), function._schema.name
        space, _, short = name.partition("::")
        if space == "vllm" and short in PYTHON and name not in OURS:
            with BigOnMeta(), self:  # both are off while one of their operators runs
                return PYTHON[short](*args, **keywords)
        if space == "c10d":
            answer = _fake_collective(function, args)
        elif name == "aten::histc" and args[0].is_meta:
            answer = _equal_counts(args[0].numel(), keywords.get("bins", args[1] if len(args) > 1 else 100))
        else:
            answer = self._on_meta(function, name, args, _on_host(function, args, keywords))
        if not (function.is_view or name.startswith(_SILENT)):
            self.record(name, (args, keywords), answer)
        return answer

    def _on_meta(self, function: Any, name: str, args: Any, keywords: dict[str, Any]) -> Any:
        """Run an operator on meta if one of its tensors is; small real tensors go in as copies and come back."""
        tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
        if name.startswith("aten::") and not any(tensor.is_meta for tensor in tensors):
            return function(*args, **keywords)
        copies = {id(tensor): tensor.to("meta") for tensor in tensors if not tensor.is_meta}
        args, keywords = tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, keywords))
        if name in OURS:
            self.ours.add(name)
            answer = OURS[name](*args, **keywords)
        else:
            answer = function(*args, **keywords)
        originals = {id(copy): tensor for tensor in tensors if (copy := copies.get(id(tensor))) is not None}
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), answer)

    def record(self, name: str, inputs: Any, outputs: Any) -> None:
        self.lines.append(f"{name}({shapes(inputs)}) -> {shapes(outputs) or '()'}")


def shapes(tree: Any) -> str:
    """`bf16[8,6144], i8[3]` of all tensors in it."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return ", ".join(f"{_SHORT.get(t.dtype, str(t.dtype)[6:])}{list(t.shape)}".replace(" ", "") for t in tensors)


def _on_host(function: Any, args: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Replace a device argument: large tensors go to meta, small ones to the CPU."""
    if keywords.get("device") is None:
        return keywords
    source = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if source is not None and "copy" in function._schema.name:
        device = source.device
    else:
        sizes = [argument for argument in args[:2] if isinstance(argument, list | tuple | torch.Size)]
        large = bool(sizes) and torch.Size(sizes[0]).numel() > REAL_ELEMENTS
        device = torch.device("meta" if large or torch.device(keywords["device"]).type == "meta" else "cpu")
    return keywords | {"device": device, **({"pin_memory": False} if keywords.get("pin_memory") else {})}


def _fake_collective(function: Any, args: Any) -> Any:
    """A collective without other ranks: outputs are unchanged, except gathered counts, which are those of this rank."""
    from torch._C._distributed_c10d import FakeWork

    first, second = args[0], args[1]
    if "allgather_base" in function._schema.name and not first.is_meta and not second.is_meta:
        first.view(-1, *second.shape).copy_(second.expand(first.numel() // second.numel(), *second.shape))
    work = FakeWork().boxed()
    returns = [str(result.type) for result in function._schema.returns]
    answers = [work if "Work" in result else first for result in returns]
    return answers[0] if len(answers) == 1 else tuple(answers)


def _equal_counts(total: int, bins: int) -> torch.Tensor:
    counts = torch.full((bins,), total // bins, dtype=torch.int32)
    counts[: total % bins] += 1
    return counts


def table(lines: list[str]) -> dict[str, Any]:
    """Distinct lines, and the index of each call."""
    numbers: dict[str, int] = {}
    order = [numbers.setdefault(line, len(numbers)) for line in lines]
    return {"operators": list(numbers), "order": order}


class FakeStream:
    """A stream or an event that has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., FakeStream]:
        return lambda *_, **__: self

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def without_streams() -> None:
    """Replace torch_npu's streams and events, which need a device."""
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "default_stream"):
        setattr(torch.npu, name, FakeStream)  # type: ignore[attr-defined]
