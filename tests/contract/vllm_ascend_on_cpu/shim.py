"""What stands for the NPU on a machine without one. Imported by every script, before anything of vLLM.

Only the machine is replaced: the calls that need a device or HCCL. Nothing that reads a checkpoint is touched, and
vLLM finds the platform and vllm-ascend's patches through their own entry points.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch_npu


def same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def import_torchvision() -> None:
    """PyPI's build is for CUDA: its operators do not load, and it fails on the missing ones. Names will do."""
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


class OtherModels(MetaPathFinder, Loader):
    """Kernel libraries of other models, which no wheel on PyPI holds: patches of 0.30 import names of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "fla_npu" else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{module.__name__} is not here: GLM-5 was not expected to call it")

        def get(name: str) -> Any:
            if name[0] == "_":
                raise AttributeError(name)
            return missing

        module.__dict__["__getattr__"] = get


sys.meta_path.append(OtherModels())
import_torchvision()
torch.version.cann = None  # without CANN it is 'not known', which vllm-ascend would parse as a number
torch_npu.npu_format_cast = same  # no NZ layout: every tensor keeps the one it has
torch.Tensor.npu = same  # type: ignore[attr-defined]
torch.npu.current_device = lambda: 0  # asking would start the device

from vllm_ascend.platform import NPUPlatform  # noqa: E402  # needs the version above

NPUPlatform.device_type = "cpu"  # where models are built and loaded


def without_hccl() -> None:
    """The MoE schemes ask HCCL for the name of a group, and do without if there is no group. Call after the patches."""
    for name in ("w4a8", "w8a8_dynamic", "w4a8.w4a8", "w8a8.w8a8_dynamic"):  # 0.23's files, and 0.30's
        try:
            module = import_module(f"vllm_ascend.quantization.methods.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "get_mc2_group"):
            module.get_mc2_group = lambda: None
