"""`from glm5_ascend.verify import verify`: the function that the command calls."""

from __future__ import annotations

import json
from pathlib import Path

from glm5_ascend.verify import verify
from tests.support.command import in_process


def test_python_and_command_say_the_same(tiny_w4a8: Path, tiny_source: Path) -> None:
    arguments = ["verify", tiny_w4a8, "--against", tiny_source, "--engine", "sglang"]
    report = verify(str(tiny_w4a8), against=str(tiny_source), engine="sglang")
    shown = json.loads(in_process(*arguments, "--json").stdout)
    assert report.to_dict() == shown
    assert report.ok is shown["ok"] is shown["engine"]["loads"] is True and shown["engine"]["notes"]
    text = in_process(*arguments).stdout.splitlines()
    assert "SGLang 0.5.23: loads it" in text and text[-1].startswith("ok:")
    assert in_process("verify", tiny_w4a8, "--engine", "tgi").returncode == 2
