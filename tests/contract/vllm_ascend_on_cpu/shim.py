"""The stand-ins for an NPU that `glm5-ascend rehearse` uses, for scripts with real weights on one rank.

Imported by every script before vLLM. `glm5_rehearsal` is glm5_ascend/deploy/rehearsal/inside.
"""

from __future__ import annotations

from importlib import import_module

from glm5_rehearsal import machine

machine.prepare()


def without_hccl() -> None:
    """The MoE schemes read the name of an HCCL group, unless there is no group. Call after vllm-ascend's patches."""
    for name in ("w4a8", "w8a8_dynamic", "w4a8.w4a8", "w8a8.w8a8_dynamic"):  # files of both lines
        try:
            module = import_module(f"vllm_ascend.quantization.methods.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "get_mc2_group"):
            module.get_mc2_group = lambda: None
