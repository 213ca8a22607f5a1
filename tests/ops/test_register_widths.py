"""The compiled attention in the register width that this processor does not choose by itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from glm5_kernels.compiled import simd
from tests.support.command import ROOT, environment

WIDE, NARROW = (8, 2), (4, 1)


def test_attention_in_the_other_width(tmp_path: Path) -> None:
    """512-bit sums (pairs of bf16 included) where the processor lacks the registers, else 256-bit ones."""
    wide = (simd.HEADS, simd.GROUPS) == WIDE
    heads, groups = NARROW if wide else WIDE
    command = [sys.executable, "-m", "tests.ops.support.width", str(heads), str(groups)]
    done = subprocess.run(
        [*command, "tests/ops/test_compiled_attention.py"], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment() | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 25
    assert wide or "skipped" not in done.stdout  # the pairs were run
