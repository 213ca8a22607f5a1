"""A torch device "npu:0" made of host memory, and a program that quantizes on it.

Its tensors behave as a real device's do where code goes wrong: an operation that mixes them with host tensors fails,
their bytes cannot be read without a copy to the host, and there is no float64 and no e4m3, as on an Atlas A2/A3.

    python python_device.py SRC OUT RECIPE CALIB OPERATORS   # OPERATORS gets the names of all operators used
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NO_DTYPES = {torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128}
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
used: set[str] = set()


class Remote(torch.Tensor):
    """A tensor of the device; `host` is its memory."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Remote:
        if host.dtype in NO_DTYPES:
            raise RuntimeError(f"npu has no {host.dtype}")
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=torch.device("npu", 0),
        )  # fmt: skip
        wrapper.host = host
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator on host memory, its result where a device would leave it."""
    name = func._schema.name
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    remote = any(isinstance(tensor, Remote) for tensor in tensors)
    if remote:
        used.add(func.name())
    mixed = [t for t in tensors if not isinstance(t, Remote) and t.dim()]
    if remote and mixed and name not in COPIES:
        raise RuntimeError(f"{name}: expected all tensors on one device, found npu:0 and {list(mixed[0].shape)} on cpu")
    if kwargs.get("device") is not None:
        remote = torch.device(kwargs["device"]).type == "npu"
        kwargs = kwargs | {"device": torch.device("cpu")}
    remotes = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, Remote)}
    plain = tree_map(lambda value: value.host if isinstance(value, Remote) else value, (args, kwargs))
    out = func(*plain[0], **plain[1])

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return remotes[id(value)] if id(value) in remotes else Remote(value) if remote else value

    return tree_map(to_device, out)


def install() -> None:
    """Give torch the device: factories make `Remote` tensors, everything else finds its way through them."""
    _setup_privateuseone_for_python_backend("npu")
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, **_: Any) -> Remote:
        return Remote(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Remote:
        return Remote(torch.empty_strided(size, stride, dtype=dtype))

    def factory(operator: Any) -> Any:  # torch would create them by resizing, which a wrapper's shape does not follow
        return lambda *args, **kwargs: Remote(operator(*args, **kwargs | {"device": torch.device("cpu")}))

    for name in ("eye", "eye.m", "arange", "arange.start", "arange.start_step"):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, factory(operator), "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    install.library = library  # type: ignore[attr-defined]  # it unregisters when it is collected


def main() -> None:
    from glm5_ascend.quantize.calibration import forward
    from glm5_ascend.quantize.job import open_job
    from glm5_ascend.quantize.options import QuantizeOptions
    from glm5_ascend.quantize.pipeline import quantize
    from glm5_ascend.quantize.progress import silent

    install()
    host_has_it = forward.native_bf16(torch.device("cpu"))
    forward.native_bf16 = lambda _: host_has_it  # the device multiplies what the host multiplies: equal bytes
    source, out, recipe, calib, operators = sys.argv[1:]
    options = QuantizeOptions(Path(source), Path(out), recipe, calib=Path(calib), samples=4, seq_len=64, threads=2)
    quantize(dataclasses.replace(open_job(options), device=torch.device("npu", 0)), silent)
    Path(operators).write_text(json.dumps(sorted(used)))


if __name__ == "__main__":
    main()
