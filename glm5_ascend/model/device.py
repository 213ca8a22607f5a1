"""Devices for tensors, and what each of them computes well."""

from __future__ import annotations

import platform

import torch

from glm5_ascend.errors import Glm5Error, MissingEnvironmentError, shown

#: Work that stays on the host for every device, and why; printed, so that no fallback is silent.
ON_HOST = {
    "dequantizing FP8 sources": "Atlas A2/A3 have no e4m3",
    "sums of activations": "int64 in files, independent of their order",
    "GPTQ": "column by column, a few launches each",
}
#: torch's device types besides the CPU, and the command that lists such devices.
_LISTS = {"npu": "npu-smi info", "cuda": "nvidia-smi"}


def find_device(name: str, kinds: tuple[str, ...] = ("npu",)) -> torch.device:
    """`cpu`, or a device of one of these kinds: `npu` (the first) or `npu:N`.

    Args:
        kinds: of "npu" and "cuda".
    Raises:
        Glm5Error: no such name. MissingEnvironmentError: no such device, or torch_npu does not load.
    """
    if name == "cpu":
        return torch.device("cpu")
    device_type, _, index = name.partition(":")
    if device_type not in kinds or not ((index.isascii() and index.isdecimal() and len(index) < 6) or not index):
        names = ", ".join(["cpu", *(f"{device_type}, {device_type}:N" for device_type in kinds)])
        raise Glm5Error(f"--device {shown(name)}: unknown device", f"give one of {names}")
    if device_type == "npu":
        _load_torch_npu(name)
    elif not torch.backends.cuda.is_built():
        raise MissingEnvironmentError(f"--device {name}: this torch is no CUDA build", "install one, or --device cpu")
    ordinal = int(index or 0)
    count = torch.accelerator.device_count()
    if ordinal >= count:
        raise MissingEnvironmentError(
            f"--device {name}: no {device_type.upper()} device {ordinal}, torch sees {count}",
            f"run {_LISTS[device_type]}",
        )
    return torch.device(device_type, ordinal)


def _load_torch_npu(name: str) -> None:
    try:
        import torch_npu  # noqa: F401  # registers the device with torch
    except Exception as error:  # without CANN's libraries it raises anything from OSError to AttributeError
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise MissingEnvironmentError(
            f"--device {name}: torch_npu does not load: {reason}", "use the vllm-ascend image, or --device cpu"
        ) from None


def native_bf16(device: torch.device) -> bool:
    """Return True if the device has bf16 matrix instructions; without them bf16 is 100 times slower."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def cpu_facts() -> dict[str, str]:
    """Return the facts that the bits of a CPU's matrix products depend on, besides torch's build."""
    bf16 = (
        "amx" if torch.cpu._is_amx_tile_supported() else "avx512_bf16" if native_bf16(torch.device("cpu")) else "none"
    )
    return {
        "arch": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16": bf16,
    }
