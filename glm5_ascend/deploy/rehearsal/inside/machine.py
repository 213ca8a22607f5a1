"""Stand-ins for an NPU on a machine without one. Imported before vLLM.

Only calls that need a device, HCCL or other ranks are replaced, not code that reads a checkpoint or chooses a layout.
vLLM finds the platform and vllm-ascend's patches by their entry points.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

#: Stand-in for an HCCL group.
_GROUP = types.SimpleNamespace(get_hccl_comm_name=lambda *_, **__: "fake")


def same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def prepare() -> None:
    """Make vLLM and vllm-ascend importable, and models built and loaded without a device."""
    _import_torchvision()
    torch.version.cann = None  # type: ignore[attr-defined]  # it would be parsed as a number
    torch_npu.npu_format_cast = same  # no NZ layout
    torch.Tensor.npu = same  # type: ignore[attr-defined]
    torch.npu.current_device = lambda: 0  # type: ignore[attr-defined]  # the real one starts the device
    sys.meta_path.append(_NotInstalled())
    from vllm.model_executor.models import registry
    from vllm_ascend.platform import NPUPlatform

    NPUPlatform.device_type = "cpu"
    registry._run_in_subprocess = lambda inspect: inspect()  # another process would not have these stand-ins


class _NotInstalled(MetaPathFinder, Loader):
    """Packages that are not on PyPI, and that GLM-5's code imports names from and does not call here.

    Kernels of other models, and the transfer library of PD. Every name is a class that cannot be made.
    """

    PACKAGES = ("fla_npu", "mooncake")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.PACKAGES else None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{module.__name__} is not installed: GLM-5 should not call it")

        def get(name: str) -> Any:
            if name[0] == "_":
                raise AttributeError(name)
            return type(name, (), {"__init__": missing})

        module.__dict__["__getattr__"] = get


def without_other_ranks(rank: int, world: int) -> None:
    """Use torch's fake process group for every group, so that no other rank is needed. Call before vLLM makes any."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    make = dist.new_group

    dist.new_group = lambda ranks=None, *_, **__: make(ranks, backend="fake")
    # The fake backend gets group rank and size only: it refuses HCCL's options.
    fake = dist.Backend._plugins["FAKE"]._replace(
        creator_fn=lambda options, _: FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    )
    dist.Backend._plugins["FAKE"] = fake
    dist.ProcessGroup._get_backend = lambda *_: _GROUP  # type: ignore[method-assign,assignment]
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    # It broadcasts a pickle; a fake broadcast does not write the output.
    parallel_state.in_the_same_node_as = lambda group, *_, **__: [True] * dist.get_world_size(group)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def _import_torchvision() -> None:
    """Import torchvision. PyPI's build is for CUDA: its operators do not load, so two are defined by name."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")
