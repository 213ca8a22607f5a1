"""Any number of processes writes the same bytes, and a stopped run may be finished by another number of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.quantize.support.kill_runs import digest
from tests.support.command import ROOT, TIMEOUT_S
from tests.support.slow_disk import on_disk
from tests.support.tiny_model import write_calibration


def start(folder: Path, source: Path, calib: Path, ranks: int, **settings: str) -> subprocess.Popen[str]:
    """`quantize` into `folder`/out by so many processes; the same command line in every folder."""
    folder.mkdir(exist_ok=True)
    for name, target in {"source": source, "calib.jsonl": calib}.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    arguments = ["quantize", "source", "out", "--recipe", "w8a8", "--calib", "calib.jsonl", "--quiet"]
    arguments += ["--samples", "3", "--seq-len", "64", "--threads", "1"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "glm5_ascend", *arguments],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | settings,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(run: subprocess.Popen[str]) -> None:
    out, err = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, out + err


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_source: Path) -> Path:
    """The output of one process."""
    folder = tmp_path_factory.mktemp("alone")
    finish(start(folder, tiny_source, write_calibration(folder / "text.jsonl"), 1))
    return folder


def kill(run: subprocess.Popen[str]) -> None:
    for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
        process.kill()
    run.communicate()


def test_ranks_give_the_same_bytes(alone: Path, tiny_source: Path, tmp_path: Path) -> None:
    finish(start(tmp_path, tiny_source, alone / "text.jsonl", 2))
    assert digest(tmp_path / "out") == digest(alone / "out")


@pytest.mark.long
def test_killed_with_two_ranks_finished_by_one(alone: Path, tiny_source: Path, tmp_path: Path) -> None:
    # A slow disk: the kill finds the run at work, whatever else the machine does.
    slow = on_disk(tmp_path / "slow", WRITE_SECONDS="0.02")
    run = start(tmp_path, tiny_source, alone / "text.jsonl", 2, **slow)
    helper = tmp_path / ".out.partial" / "journal-1.jsonl"
    while run.poll() is None and not (helper.is_file() and helper.read_text().count("\n") > 3):
        time.sleep(0.001)
    kill(run)
    assert not (tmp_path / "out").exists()
    finish(start(tmp_path, tiny_source, alone / "text.jsonl", 1))
    assert digest(tmp_path / "out") == digest(alone / "out")
    assert not (tmp_path / ".out.partial").exists()
