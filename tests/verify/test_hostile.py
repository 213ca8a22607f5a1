"""Hostile directories execute nothing, open nothing outside, cost no memory, and give findings instead of tracebacks.

Proved by Python's audit events in a process of its own; a FIFO that were opened would hold it forever.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, ran
from tests.verify.mutations.hostile import CASES
from tests.verify.support.editor import PROVENANCE, Checkpoint

LIBRARIES = tuple(
    os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, ROOT / "glm5_ascend", ROOT / "kernels")
)
MEMORY_KB = 400_000  # the largest header that is read at all, as bytes and as parsed text


@pytest.fixture(scope="module")
def outcome(tiny_w4a8: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Record of a watched process for every case, with the name that must be reported."""
    folder = tmp_path_factory.mktemp("hostile")
    named = {}
    for name, make in CASES.items():
        outside = folder / name / "outside"
        outside.mkdir(parents=True)
        shutil.copyfile(tiny_w4a8 / "tokenizer.json", outside / "secret.safetensors")
        copy = folder / name / "copy" / name
        shutil.copytree(tiny_w4a8, copy)
        named[name] = make(Checkpoint(copy), outside)
    report = folder / "report.json"
    directories = [folder / name / "copy" / name for name in CASES]
    done = ran(sys.executable, Path(__file__).parent / "support" / "watch.py", report, tiny_w4a8, *directories)
    subprocess.run(["rm", "-rf", folder / "deep_directories"], check=True)  # deeper than shutil.rmtree goes
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(report.read_text())
    assert {event for event, _ in results["control"]} >= {"open", "compile", "exec"}  # the watch does see
    return {name: results[name] | {"named": named[name], "home": folder / name} for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_hostile_directory(name: str, outcome: dict[str, Any]) -> None:
    record = outcome[name]
    home: Path = record["home"]
    inside = os.path.realpath(home / "copy" / name)
    for event, what in record["events"]:
        if event.startswith(("open", "os.")) and not what.startswith("<"):
            path = os.path.realpath(what)
            assert path == inside or path.startswith((inside + os.sep, *LIBRARIES)), f"{event} {what}"
        else:
            assert any(f'file "{library}' in what for library in LIBRARIES), f"{event} {what}"
    assert record["events"] or record["code"] == 2
    assert not (home / "outside" / "executed").exists()
    assert record["grown_kb"] < MEMORY_KB
    text = record["text"]
    assert all(line.isprintable() for line in text), text
    if record["named"] == PROVENANCE and record["code"] == 0:  # only a note beside a checkpoint that is correct
        assert any(PROVENANCE in line for line in text)
        return
    if record["named"] == "tokenizer.json":
        assert record["code"] == 1
    assert record["code"] in (1, 2), text
    assert (record["code"] == 2) == (record["named"] == "config.json"), text
    assert any(record["named"] in line for line in text), text
