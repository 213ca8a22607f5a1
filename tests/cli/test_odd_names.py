"""Names are text everywhere: markup, codes, bytes that are no UTF-8, links to themselves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.command import assert_one_clear_line, in_process, worked
from tests.support.tiny_model import write_calibration

NAMES = ["[/nothing]", "[bold red]x", ":smile:", "{0} %s", "a\nb\x1b[2J", os.fsdecode(b"caf\xe9")]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_folder_of_any_name(name: str, tiny_source: Path, tmp_path: Path) -> None:
    """Quantize, resume by --overwrite, verify, look: the name is shown as it is, or as escapes."""
    source, out = tmp_path / name, tmp_path / f"{name}-w4a8"
    shutil.copytree(tiny_source, source)
    calib = write_calibration(tmp_path / f"{name}.jsonl")
    arguments = ["quantize", source, out, "--calib", calib, "--samples", "2", "--seq-len", "32"]
    done = worked(in_process(*arguments))
    assert "wrote" in done.stderr and (name not in ("[/nothing]", ":smile:") or f"{name}-w4a8" in done.stderr)
    record = json.loads((out / "glm5_ascend_provenance.json").read_text())
    assert record["source"]["path"].isprintable()
    worked(in_process("verify", out, "--against", source))
    assert in_process(*arguments, "--overwrite", "--quiet").returncode == 0
    html = tmp_path / f"{name}.html"
    for command in (
        ["doctor", out], ["doctor", out, "--profile", "a3-single-w4a8"], ["serve", out, "--dry-run"],
        ["plan", out, "--workload", "in=64,out=64,concurrency=1", "--html", html],
        ["quantize", source, tmp_path / "other", "--recipe", name],
    ):  # fmt: skip
        done = in_process(*command)
        assert done.returncode in (0, 1, 2, 3) and "Traceback" not in done.stderr, done.stderr
    assert html.is_file()


def test_a_link_to_itself(tiny_source: Path, tiny_w4a8: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for command in (
        ["quantize", tiny_source, loop], ["quantize", tiny_source, loop, "--overwrite"],
        ["quantize", tiny_source, loop / "x"],
        ["quantize", loop, tmp_path / "out"], ["quantize", tiny_source, tmp_path / "out", "--calib", loop],
        ["quantize", tiny_source, tmp_path / "out", "--recipe", loop], ["verify", loop],
        ["verify", tiny_w4a8, "--against", loop],
        ["doctor", loop], ["serve", loop], ["plan", loop],
        ["demo-model", loop], ["deploy", "render", "a3-single-w4a8", "--out", loop],
    ):  # fmt: skip
        assert_one_clear_line(in_process(*command), 2)
    assert loop.is_symlink() and not (tmp_path / "out").exists()
