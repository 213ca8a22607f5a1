"""What the processor can do that compiled code is made for: the host's, or the one numba is told to compile for.

NUMBA_CPU_NAME restricts numba to a lesser processor, e.g. `haswell` for AVX2 without AVX-512, `nehalem` for SSE4. Code
that chooses instructions by itself has to follow it, else it asks for registers that numba does not hand out.
"""

from __future__ import annotations

import os

import llvmlite.binding

#: Features of the processors that tests and benchmarks restrict to; what is not listed is taken as absent.
RESTRICTED = {
    "nehalem": ("sse2", "sse4.1", "sse4.2"),
    "x86-64-v2": ("sse2", "sse4.1", "sse4.2"),
    "haswell": ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma"),
    "x86-64-v3": ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma"),
    "skylake-avx512": ("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl"),
}


def features() -> frozenset[str]:
    """LLVM's names, as avx2, avx512f, avx512vnni, avx512bf16, neon, dotprod."""
    host = {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    name = os.environ.get("NUMBA_CPU_NAME", "")
    return frozenset(host & set(RESTRICTED[name]) if name in RESTRICTED else host)
