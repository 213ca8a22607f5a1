"""Models of any size without their bytes, and an account of what a loader writes into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Larger tensors get no memory; smaller ones are real, because expert maps and tables are looked at while building.
REAL_ELEMENTS = 100_000
#: Scales of a rank's experts, [experts, rows, 1], are read on the host by post-processing: of so many they are real.
REAL_SCALES = 2_000_000
_FILLED: frozenset[Any] = frozenset({torch.zeros, torch.ones, torch.full})
_FACTORIES = _FILLED | {torch.empty, torch.rand, torch.randn, torch.randint}
_COMPARISONS: frozenset[Any] = frozenset({torch.allclose, torch.equal})


class BigOnMeta(TorchFunctionMode):
    """Factory calls of many elements give meta tensors; others that name an `npu` get `device`.

    Attributes:
        filled: storages of tensors that were made with values (zeros, ones), so that a loader may leave them.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.filled: set[int] = set()
        self._kept: list[torch.Tensor] = []  # a storage that is freed would give its number to another

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "npu" in str(given.get("device", "")) or isinstance(given.get("device"), int):  # 0: the current device
            given["device"] = self.device
        if function in _COMPARISONS and args[0].is_meta:  # no values to compare: what has one shape is one copy
            return args[0].shape == args[1].shape
        if function in _FACTORIES:
            given.pop("pin_memory", None)
            if _elements(args, given) > (REAL_SCALES if _is_scales(args) else REAL_ELEMENTS):
                given["device"] = "meta"
        made = function(*args, **given)
        if function in _FILLED:
            self._kept.append(made)
            self.filled.add(storage(made))
        return made


def _is_scales(args: Any) -> bool:
    shape = args[0] if args and isinstance(args[0], tuple | list) else args
    return len(shape) == 3 and shape[-1] == 1


def _elements(args: Any, given: dict[str, Any]) -> int:
    size = given.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    count = 1
    for extent in size:
        count *= int(extent) if isinstance(extent, int) else 1
    return count


@dataclass
class Written:
    """What one parameter got: regions of its storage with the tensor of the checkpoint that each came from."""

    regions: dict[tuple[Any, ...], str] = field(default_factory=dict)
    elements: int = 0


class Account(TorchDispatchMode):
    """While it is active no copy into a parameter takes place; each is checked and noted instead.

    Attributes:
        current: the checkpoint's tensor that the loader was handed last.
        written: per parameter name.
        problems: kind -> lines; kinds are `twice`, `wrong shape`, `wrong type`.
        used: tensors of the checkpoint that were written somewhere.
    """

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {storage(value): name for name, value in parameters.items()}
        self.current = ""
        self.written: dict[str, Written] = defaultdict(Written)
        self.problems: dict[str, list[str]] = defaultdict(list)
        self.used: set[str] = set()
        self._made: dict[int, str] = {}

    def handed_out(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors as a loader takes them."""
        for name, tensor in tensors:
            self.current = name
            self._made[storage(tensor)] = name
            yield name, tensor
            self._made.pop(storage(tensor), None)
        self.current = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor):
            target, source = args[0], args[1]
            if storage(target) in self.names:
                self._note(target, source)
                return target
        return function(*args, **given)

    def _note(self, target: torch.Tensor, source: Any) -> None:
        parameter = self.names[storage(target)]
        stored = self._made.get(storage(source), self.current) if isinstance(source, torch.Tensor) else self.current
        self.used.add(stored)
        if isinstance(source, torch.Tensor):
            try:
                torch.broadcast_to(torch.empty(source.shape, device="meta"), target.shape)
            except RuntimeError:
                line = f"{stored} {list(source.shape)} does not fit into {parameter} {list(target.shape)}"
                self.problems["wrong shape"].append(line)
                return
            # Offsets are whole numbers that checkpoints store as floats.
            if source.dtype.is_floating_point != target.dtype.is_floating_point and not stored.endswith("_offset"):
                self.problems["wrong type"].append(f"{stored} {source.dtype} is cast to {target.dtype} of {parameter}")
        written = self.written[parameter]
        key = (target.storage_offset(), tuple(target.shape), target.stride())
        if key in written.regions and target.numel() == 1:
            pass  # the one scale of a fused layer: each of its parts reads the same input and brings the same
        elif key in written.regions and copies(written.regions[key], stored):
            pass  # the draft's own copy of the target's table, which later versions load, too
        elif key in written.regions:
            self.problems["twice"].append(f"{parameter} by {written.regions[key]} and {stored}")
        else:
            written.elements += target.numel()
        written.regions[key] = stored

    def unwritten(self, parameters: dict[str, torch.Tensor]) -> dict[str, int]:
        """Elements of each parameter that no tensor of the checkpoint reached; those that all got theirs left out."""
        left = {name: value.numel() - self.written[name].elements for name, value in parameters.items()}
        own = {name for name, value in parameters.items() if self.names.get(storage(value)) == name}
        return {name: count for name, count in left.items() if count and name in own}  # not: replaced by the loader


def copies(one: str, other: str) -> bool:
    """Whether two tensors of a checkpoint are the same table under the names of target and draft."""
    return one.endswith("embed_tokens.weight") and other.endswith("embed_tokens.weight")


def storage(tensor: torch.Tensor) -> int:
    """The number by which two tensors know that they share their memory, also on meta."""
    return int(tensor.untyped_storage()._cdata)
