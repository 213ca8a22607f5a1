"""torch_npu, sgl_kernel_npu, torchair and acl as far as SGLang imports them. "npu" tensors are the CPU's.

Imported first: everything of SGLang asks these modules at import. A name that is not given here exists, and refuses to
be called. Nothing is copied from the packages.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

#: Modules whose absence SGLang handles by itself.
ABSENT = ("kimi_k3", "gemma_rmsnorm", "fused_rope_qk_mqa")
CHIP = "Ascend910_9391"


class Module(types.ModuleType):
    """Every name exists; what was not given refuses to run."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"no stand-in for {self.__name__}.{name}")

        return missing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        stubbed = name.split(".")[0] in ("torch_npu", "sgl_kernel_npu", "torchair", "acl")
        if not stubbed or any(part in name for part in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Module:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        CONTENTS.get(module.__name__, lambda _: None)(module)


def torch_npu(module: Any) -> None:
    module.__version__ = torch.__version__.split("+")[0]
    module._apply_patches = module._apply_all_patches = lambda *_: None
    torch.ops.npu = Module("torch.ops.npu")  # layers keep its operators when they are made
    module.npu_format_cast = torch.ops.npu.npu_format_cast = lambda tensor, *_, **__: tensor  # no NZ layout


def device(module: Any) -> None:
    """`torch.npu`: one device that is there."""

    def nothing(*_: Any, **__: Any) -> None: ...

    for name in (
        "set_device", "synchronize", "empty_cache", "set_compile_mode", "reset_peak_memory_stats", "_lazy_init",
        "manual_seed", "manual_seed_all", "_is_in_bad_fork",
    ):  # fmt: skip
        setattr(module, name, nothing)
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.mem_get_info = lambda *_: (60 << 30, 64 << 30)
    module.memory_allocated = module.max_memory_allocated = module.memory_reserved = lambda *_: 0
    module.Stream = module.Event = module.ExternalStream = MagicMock  # has always finished
    module.current_stream = module.default_stream = lambda *_: MagicMock()
    module.stream = lambda *_: contextlib.nullcontext()
    module.get_device_name = lambda *_: CHIP
    module.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=64 << 30, name=CHIP)
    module.config = types.SimpleNamespace(allow_internal_format=False)
    module.NPUGraph = module.NpuGraphOpHandler = type("NPUGraph", (), {})
    module.register_npu_graph_handler = lambda *_, **__: lambda handler: handler


def profiler(module: Any) -> None:
    module.ProfilerActivity = types.SimpleNamespace(NPU=1, CPU=0)
    module.profile = module._ExperimentalConfig = object
    module.tensorboard_trace_handler = None


def extensions(module: Any) -> None:
    module._weak_ref_tensor = lambda tensor: tensor


def compiler_config(module: Any) -> None:
    """Asked for a backend of torch.compile, which is switched off on an NPU."""
    module.CompilerConfig = MagicMock


def torchair(module: Any) -> None:
    module.get_npu_backend = lambda **_: "eager"


def acl(module: Any) -> None:
    """Asked which chip this is."""
    module.rt = types.SimpleNamespace(get_device_info=lambda *_: (2201, 0), get_soc_name=lambda: CHIP)


CONTENTS: dict[str, Callable[[Any], None]] = {
    "torch_npu": torch_npu,
    "torch_npu.npu": device,
    "torch_npu._C": extensions,
    "torch_npu.profiler": profiler,
    "torchair": torchair,
    "torchair.configs.compiler_config": compiler_config,
    "acl": acl,
}


class NpuIsCpu(TorchFunctionMode):
    """Devices called "npu" are the CPU."""

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})


def on_cpu(value: Any) -> Any:
    if isinstance(value, str):
        return "cpu" if value.split(":")[0] == "npu" else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def install() -> None:
    """Make all of it importable, and torch's own device name `npu`."""
    torch.utils.rename_privateuse1_backend("npu")
    sys.meta_path.insert(0, Finder())
    for name in (
        "torch_npu.npu", "torch_npu._C", "torch_npu.contrib.transfer_to_npu", "torch_npu.profiler",
        "torch_npu.multiprocessing.reductions",
    ):  # fmt: skip
        __import__(name)
    torch.npu = sys.modules["torch.npu"] = sys.modules["torch_npu.npu"]  # type: ignore[attr-defined]
    torch.Tensor.npu = lambda self, *_, **__: self  # type: ignore[attr-defined]
    torch.Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.nn.Module.npu = lambda self, *_: self  # type: ignore[attr-defined]
    for name in ("nms", "qnms"):  # PyPI's torchvision is built for CUDA: it fails on operators that are not named
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    NpuIsCpu().__enter__()
