"""The scripts of benchmarks/ take hours: what a test can see of them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.command import environment

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
TOOLS = sorted(f"tools.{path.stem}" for path in (FOLDER / "tools").glob("*.py") if path.stem != "__init__")


def test_the_script_for_an_npu_measures_what_runs_here() -> None:
    """On a CPU the compiled op, checked; without an NPU one line and exit code 3."""
    command = [sys.executable, str(FOLDER / "bench_npu.py"), "--rounds", "1", "--only", "preprocess T=8"]
    here, npu = (
        subprocess.run([*command, "--device", device], capture_output=True, text=True, check=False, env=environment())
        for device in ("cpu", "npu")
    )
    assert here.returncode == 0 and re.search(r"\| `mla_preprocess` \| T=8 \| cpu \| [\d.]+ us \|", here.stdout)
    assert npu.returncode == 3 and "torch_npu does not load" in npu.stderr and "Traceback" not in npu.stderr


def test_the_readme_has_a_section_for_every_script() -> None:
    """And no section for one that is not there."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (\w+)\.py$", text, re.MULTILINE)) == SCRIPTS
    assert sorted(re.findall(r"`tools/(\w+)\.py` \|", text)) == [name.removeprefix("tools.") for name in TOOLS]


def test_a_peer_that_cannot_be_built_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bench_peers.py: the line of the log that names the error; what was measured before it stays."""
    monkeypatch.syspath_prepend(FOLDER)
    build, report = (importlib.import_module(f"peers.{name}") for name in ("build", "report"))
    code, log = "print('fatal error: no compiler'); print('stopped'); raise SystemExit(3)", tmp_path / "logs/peer.log"
    with pytest.raises(build.NotBuiltError, match=f"exit code 3: fatal error: no compiler .{log}"):
        build.run([sys.executable, "-c", code], log)
    results, command = report.Results(), f"decode:1:512:{report.STEPS}"
    answer = f"""print('{{"command": "{command}", "ms": [90, 110, 100]}}'); raise SystemExit(1)"""
    results.run(report.OURS, 1, [sys.executable, "-c", answer], log)
    assert results.failed == {report.OURS: f"exit code 1: {log}"}
    row = report.per_second(results, [report.OURS, report.Q4], "decode", (1, command, "ms"), 1)
    assert row == "| decode | 1 | 10 | not run |  |" and len(results.foreign) == 1


def test_ended_peers_leave_no_process(tmp_path: Path) -> None:
    """bench_peers.py: its children and theirs, here those of the virtual environment that it makes first."""
    command = [
        sys.executable,
        FOLDER / "bench_peers.py",
        "--prepare",
        "--work",
        tmp_path,
        "--engines",
        "llama.cpp Q4_0",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        started = psutil.Process(process.pid)
        while process.poll() is None and len(started.children(recursive=True)) < 2:
            time.sleep(0.05)
        children = started.children(recursive=True)
        process.terminate()
        assert process.wait() == 143
    assert len(children) > 1
    assert not psutil.wait_procs(children, timeout=60)[1]
