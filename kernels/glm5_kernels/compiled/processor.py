"""CPU features that compiled code is generated for: the host's, or those of the CPU that numba is told to compile for.

NUMBA_CPU_NAME restricts numba to an older CPU, e.g. `haswell` for AVX2 without AVX-512. NUMBA_CPU_FEATURES has to be
set to nothing then, else numba adds the host's features again. Code that selects instructions itself follows these
variables, because numba does not allocate registers that its target lacks.
"""

from __future__ import annotations

import os
from functools import cache

import llvmlite.binding

_AVX2 = ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl")
#: Features of the CPUs that tests and benchmarks restrict to; other features count as absent.
RESTRICTED = {
    "nehalem": ("sse2", "sse4.1", "sse4.2"),
    "haswell": _AVX2,
    "alderlake": (*_AVX2, "avxvnni"),
    "skylake-avx512": _AVX512,
    "icelake-server": (*_AVX512, "avx512vnni"),
    "tsv110": ("neon", "dotprod"),  # Kunpeng 920
    "neoverse-v1": ("neon", "dotprod", "i8mm"),
}
#: Compiled code needs one of these, which `int8_backends.BACKENDS` multiplies with.
REQUIRED = ("avx512vnni", "avxvnni", "avx2", "i8mm", "dotprod")


def restricted_to(name: str) -> dict[str, str]:
    """Environment variables that make numba compile for a CPU of `RESTRICTED` and nothing more."""
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}


@cache
def features() -> frozenset[str]:
    """LLVM's names of the CPU features, e.g. avx2, avx512f, avx512vnni, avx512bf16, neon, dotprod, i8mm."""
    name = os.environ.get("NUMBA_CPU_NAME", "")
    if name in RESTRICTED:
        return frozenset(RESTRICTED[name])
    return frozenset(name for name, present in llvmlite.binding.get_host_cpu_features().items() if present)


def missing_feature() -> str | None:
    """The reason why compiled code cannot run on this CPU; None if it can."""
    if features().isdisjoint(REQUIRED):
        return f"this CPU has none of {', '.join(REQUIRED)}"
    return None
