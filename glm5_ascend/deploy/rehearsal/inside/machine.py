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
    _stand_in_for_mooncake()
    sys.meta_path.append(_OtherModels())
    from vllm.model_executor.models import registry
    from vllm_ascend.platform import NPUPlatform

    NPUPlatform.device_type = "cpu"
    registry._run_in_subprocess = lambda inspect: inspect()  # another process would not have these stand-ins


class _OtherModels(MetaPathFinder, Loader):
    """Kernel libraries of other models, which are not on PyPI: vllm-ascend's patches import names from them."""

    PACKAGES = ("fla_npu",)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.PACKAGES else None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{module.__name__} is not installed: GLM-5 should not call it")

        def get(name: str) -> Any:
            if name[0] == "_":
                raise AttributeError(name)
            return missing

        module.__dict__["__getattr__"] = get


def without_other_ranks(rank: int, world: int) -> None:
    """Use torch's fake process group for every group, so that no other rank is needed. Call before vLLM makes any."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    make = dist.new_group

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return make(ranks, backend="fake")

    dist.new_group = torch.distributed.new_group = new_group
    _without_hccl_options()
    dist.ProcessGroup._get_backend = lambda *_: _GROUP  # type: ignore[method-assign,assignment]
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    # It broadcasts a pickle; a fake broadcast does not write the output.
    parallel_state.in_the_same_node_as = lambda group, *_, **__: [True] * dist.get_world_size(group)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def _without_hccl_options() -> None:
    """Pass only group rank and size to the fake backend, which refuses HCCL's options."""
    from torch._C._distributed_c10d import FakeProcessGroup

    plugin = dist.Backend._plugins["FAKE"]
    dist.Backend._plugins["FAKE"] = plugin._replace(
        creator_fn=lambda options, _: FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    )


def _import_torchvision() -> None:
    """Import torchvision. PyPI's build is for CUDA: its operators do not load, so two are defined by name."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")


def _stand_in_for_mooncake() -> None:
    """Stand in for the transfer library of PD: the configuration imports it and calls nothing."""
    for name in ("mooncake", "mooncake.engine"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["mooncake.engine"].TransferEngine = type("TransferEngine", (), {})  # type: ignore[attr-defined]
