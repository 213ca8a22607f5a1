"""The scripts of benchmarks/ take hours: what a test can see of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.command import ran

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
TOOLS = sorted(f"tools.{path.stem}" for path in (FOLDER / "tools").glob("*.py") if path.stem != "__init__")


def test_the_script_for_an_npu_measures_what_runs_here() -> None:
    """On a CPU the compiled op, checked; without an NPU one line and exit code 3."""
    command = [sys.executable, FOLDER / "bench_npu.py", "--rounds", "1", "--only", "preprocess T=8"]
    here, npu = (ran(*command, "--device", device) for device in ("cpu", "npu"))
    assert here.returncode == 0 and re.search(r"\| `mla_preprocess` \| T=8 \| cpu \| [\d.]+ us \|", here.stdout)
    assert npu.returncode == 3 and "torch_npu does not load" in npu.stderr and "Traceback" not in npu.stderr


def test_the_readme_has_a_section_for_every_script() -> None:
    """And no section for one that is not there."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (\w+)\.py$", text, re.MULTILINE)) == SCRIPTS
    assert sorted(re.findall(r"`tools/(\w+)\.py` \|", text)) == [name.removeprefix("tools.") for name in TOOLS]
