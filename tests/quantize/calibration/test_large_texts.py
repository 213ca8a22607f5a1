"""A gigabyte of calibration text in one line: read and tokenized in pieces, within a limit of memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, TIMEOUT_S, environment

GIB = 1024**3
#: Of what the command may allocate in all; torch and numba take half of it.
LIMIT_BYTES = GIB
SENTENCE = "The quick brown fox jumps over the lazy dog, 0123456789 times. "


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "glm5_ascend", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment(), timeout=TIMEOUT_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES)),
    )  # fmt: skip


def write_repeated(path: Path, begin: str, end: str) -> None:
    block = (SENTENCE * 20000).encode()
    with path.open("wb") as file:
        file.write(begin.encode())
        for _ in range(GIB // len(block) + 1):
            file.write(block)
        file.write(end.encode())


@pytest.mark.long
def test_one_line_of_a_gigabyte(tiny_source: Path, tmp_path: Path) -> None:
    text = tmp_path / "large.txt"
    write_repeated(text, "", "\n")
    done = limited("quantize", tiny_source, tmp_path / "out", "--calib", text, "--samples", 4, "--seq-len", 32)
    assert done.returncode == 0, done.stderr
    text.unlink()
    record = tmp_path / "large.jsonl"
    write_repeated(record, '"', '"\n')
    done = limited("quantize", tiny_source, tmp_path / "other", "--calib", record, "--samples", 4, "--seq-len", 32)
    assert done.returncode == 2 and "large.jsonl:1: longer than 67108864 characters" in done.stderr, done.stderr
    assert not (tmp_path / "other").exists()
