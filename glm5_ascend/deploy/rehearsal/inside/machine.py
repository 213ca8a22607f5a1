"""What stands for the NPU on a machine without one. Imported before anything of vLLM.

Only the machine is replaced: calls that need a device, HCCL or other ranks. Nothing that reads a checkpoint or decides
about a layout is touched; vLLM finds the platform and vllm-ascend's patches through their own entry points.
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

#: torch_npu's number of an A3's; those of A2 are below it, Ascend 950 is above.
SOC_VERSION = 250
#: A name that HCCL would give.
_GROUP = types.SimpleNamespace(get_hccl_comm_name=lambda *_, **__: "fake")


def same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def prepare() -> None:
    """Make vLLM and vllm-ascend importable, and models built and loaded without a device."""
    from . import walk

    walk.remember_python_operators()
    _import_torchvision()
    torch.version.cann = None  # type: ignore[attr-defined]  # 'not known' would be parsed as a number
    torch_npu.npu_format_cast = same  # no NZ layout: every tensor keeps the one it has
    torch.Tensor.npu = same  # type: ignore[attr-defined]
    torch.npu.current_device = lambda: 0  # type: ignore[attr-defined]  # asking would start the device
    # Meta kernels of exchanges between A2 machines ask which processor it is, and asking starts the device.
    import_module("torch_npu.op_plugin.meta._meta_registrations").__dict__["get_soc_version"] = lambda: SOC_VERSION
    _stand_in_for_mooncake()
    sys.meta_path.append(_OtherModels())
    from vllm.model_executor.models import registry
    from vllm_ascend.platform import NPUPlatform

    NPUPlatform.device_type = "cpu"
    registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own would lack all this


class _OtherModels(MetaPathFinder, Loader):
    """Kernel libraries of models other than GLM-5, which no wheel on PyPI holds: patches import names of them."""

    PACKAGES = ("fla_npu",)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.PACKAGES else None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{module.__name__} is not here: GLM-5 was not expected to call it")

        def get(name: str) -> Any:
            if name[0] == "_":
                raise AttributeError(name)
            return missing

        module.__dict__["__getattr__"] = get


def without_other_ranks(rank: int, world: int) -> None:
    """Torch's fake process group for every group: no other rank is waited for. Before vLLM makes its groups."""
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
    # It broadcasts a pickle, and a fake broadcast leaves what lay in the memory.
    parallel_state.in_the_same_node_as = lambda group, *_, **__: [True] * dist.get_world_size(group)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def _without_hccl_options() -> None:
    """The fake backend's maker is handed HCCL's options, which it would refuse: it gets what it needs of them."""
    from torch._C._distributed_c10d import FakeProcessGroup

    plugin = dist.Backend._plugins["FAKE"]
    dist.Backend._plugins["FAKE"] = plugin._replace(
        creator_fn=lambda options, _: FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    )


def _import_torchvision() -> None:
    """PyPI's build is for CUDA: its operators do not load, and it fails on the missing ones. Names will do."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")


def _stand_in_for_mooncake() -> None:
    """The transfer library of PD needs the machine's network; configuring imports it and calls nothing."""
    for name in ("mooncake", "mooncake.engine"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["mooncake.engine"].TransferEngine = type("TransferEngine", (), {})  # type: ignore[attr-defined]
