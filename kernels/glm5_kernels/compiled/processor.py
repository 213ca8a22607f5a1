"""What the processor can do that compiled code is made for: the host's, or the one numba is told to compile for.

NUMBA_CPU_NAME restricts numba to a lesser processor, e.g. `haswell` for AVX2 without AVX-512, `nehalem` for SSE4;
without NUMBA_CPU_FEATURES set to nothing, numba adds what the host has all the same. Code that chooses instructions by
itself has to follow it, else it asks for registers that numba does not hand out.
"""

from __future__ import annotations

import os

import llvmlite.binding

_AVX512 = ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl")
#: Features of the processors that tests and benchmarks restrict to; what is not listed is taken as absent.
RESTRICTED = {
    "nehalem": ("sse2", "sse4.1", "sse4.2"),
    "x86-64-v2": ("sse2", "sse4.1", "sse4.2"),
    "haswell": ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma"),
    "x86-64-v3": ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma"),
    "alderlake": ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma", "avxvnni"),
    "tsv110": ("neon", "dotprod"),  # Kunpeng 920
    "neoverse-v1": ("neon", "dotprod", "i8mm"),
    "cortex-a72": ("neon",),  # the first ARM servers
    "skylake-avx512": _AVX512,
    "icelake-server": (*_AVX512, "avx512vnni"),
}


def restricted_to(name: str) -> dict[str, str]:
    """The variables under which numba compiles for a processor of `RESTRICTED` and nothing more."""
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}


def features() -> frozenset[str]:
    """LLVM's names, as avx2, avx512f, avx512vnni, avx512bf16, neon, dotprod, i8mm."""
    name = os.environ.get("NUMBA_CPU_NAME", "")
    if name in RESTRICTED:
        return frozenset(RESTRICTED[name])
    return frozenset(name for name, present in llvmlite.binding.get_host_cpu_features().items() if present)
