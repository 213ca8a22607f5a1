"""Models of any size without memory, and a record of what a loader writes into them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Larger tensors are meta tensors. Smaller ones are real, because expert maps and tables are read while building.
REAL_ELEMENTS = 100_000
#: Scales of a rank's experts [experts, rows, 1] are real up to this size: post-processing reads them on the host.
REAL_SCALES = 2_000_000
EMBEDDING = "embed_tokens.weight"
_FILLED: frozenset[Any] = frozenset({torch.zeros, torch.ones, torch.full})
_FACTORIES = _FILLED | {torch.empty, torch.rand, torch.randn, torch.randint}
_COMPARISONS: frozenset[Any] = frozenset({torch.allclose, torch.equal})
#: Offset, shape and strides of a part of a storage.
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]


class BigOnMeta(TorchFunctionMode):
    """Large tensors are created on meta; small ones that name an `npu` are created on `device`.

    Attributes:
        filled: storages of tensors created with values (zeros, ones); a loader need not write them.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.filled: set[int] = set()
        self._alive: list[torch.Tensor] = []  # a freed storage would give its number to another

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if "npu" in str(keywords.get("device", "")) or isinstance(keywords.get("device"), int):  # 0: the current device
            keywords["device"] = self.device
        if function in _COMPARISONS and args[0].is_meta:  # no values to compare
            return args[0].shape == args[1].shape
        if function in _FACTORIES:
            keywords.pop("pin_memory", None)
            shape = keywords.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
            most = REAL_SCALES if len(shape) == 3 and shape[-1] == 1 else REAL_ELEMENTS
            if math.prod(extent for extent in shape if isinstance(extent, int)) > most:
                keywords["device"] = "meta"
        tensor = function(*args, **keywords)
        if function in _FILLED:
            self._alive.append(tensor)
            self.filled.add(storage(tensor))
        return tensor


class LoadRecord(TorchDispatchMode):
    """Checks and records every copy into a parameter instead of doing it.

    Attributes:
        current: tensor of the checkpoint that the loader received last.
        written: by parameter name, part of its storage -> tensor of the checkpoint.
        problems: `written twice`, ... -> lines.
        used: tensors of the checkpoint that were written to a parameter.
    """

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {storage(value): name for name, value in parameters.items()}
        self.current = ""
        self.written: dict[str, dict[_Region, str]] = defaultdict(dict)
        self.problems: dict[str, list[str]] = defaultdict(list)
        self.used: set[str] = set()
        self._sources: dict[int, str] = {}

    def tensors(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors to a loader."""
        for name, tensor in tensors:
            self.current = name
            self._sources[storage(tensor)] = name
            yield name, tensor
            self._sources.pop(storage(tensor), None)
        self.current = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor):
            target, source = args[0], args[1]
            if storage(target) in self.names:
                self._record(target, source)
                return target
        return function(*args, **keywords)

    def _record(self, target: torch.Tensor, source: Any) -> None:
        parameter = self.names[storage(target)]
        stored = self._sources.get(storage(source), self.current) if isinstance(source, torch.Tensor) else self.current
        self.used.add(stored)
        if isinstance(source, torch.Tensor):
            try:
                torch.broadcast_to(torch.empty(source.shape, device="meta"), target.shape)
            except RuntimeError:
                line = f"{stored} {list(source.shape)} does not fit into {parameter} {list(target.shape)}"
                self.problems["of a wrong shape"].append(line)
                return
            # Offsets are whole numbers that checkpoints store as floats.
            if source.dtype.is_floating_point != target.dtype.is_floating_point and not stored.endswith("_offset"):
                line = f"{stored} {source.dtype} is cast to {target.dtype} of {parameter}"
                self.problems["cast between integers and floats"].append(line)
        regions, key = self.written[parameter], (int(target.storage_offset()), tuple(target.shape), target.stride())
        earlier = regions.get(key, stored)
        # Parts of a fused layer have one input scale, and newer lines load the draft's copy of the target's table.
        may_repeat = target.numel() == 1 or (earlier.endswith(EMBEDDING) and stored.endswith(EMBEDDING))
        if key in regions and not may_repeat:
            self.problems["written twice"].append(f"{parameter} by {earlier} and {stored}")
        regions[key] = stored

    def unwritten(self, parameters: dict[str, torch.Tensor]) -> dict[str, int]:
        """Parameter -> number of elements that no tensor of the checkpoint wrote; complete parameters are left out."""
        counts = {name: sum(math.prod(shape) for _, shape, _ in regions) for name, regions in self.written.items()}
        missing = {name: value.numel() - counts.get(name, 0) for name, value in parameters.items()}
        built = {name for name, value in parameters.items() if self.names.get(storage(value)) == name}
        return {name: count for name, count in missing.items() if count and name in built}  # not: replaced


def storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; tensors that share memory have the same one, also on meta."""
    return int(tensor.untyped_storage()._cdata)
