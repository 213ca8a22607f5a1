"""Tests in another register width: `python -m tests.ops.support.width HEADS GROUPS [pytest's arguments]`.

The kernels take their width from the processor when they are imported (`compiled.simd`); their code is LLVM's vectors,
which every processor runs in either width. Set NUMBA_CACHE_DIR to a folder of its own, since compiled code is kept by
source file and not by width.
"""

from __future__ import annotations

import sys

import pytest

from glm5_kernels.compiled import simd

if __name__ == "__main__":
    heads, groups, *arguments = sys.argv[1:]
    simd.HEADS, simd.GROUPS = int(heads), int(groups)
    simd.FEWER, simd.STEP = simd.HEADS // 2, simd.WIDTH * simd.GROUPS
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
