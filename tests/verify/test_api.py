"""`from glm5_ascend.verify import verify`: the function that the command calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_ascend.verify import CheckpointFinding, Report, WeightError, verify
from tests.support.command import in_process


def test_importing_it_loads_no_torch() -> None:
    code = (
        "import sys, glm5_ascend.verify as v; v.Report; print('torch' in sys.modules); v.verify; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    import glm5_ascend.verify as package

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
    assert set(package.__all__) == {x.__name__ for x in (CheckpointFinding, Report, WeightError, verify)}


def test_python_and_command_say_the_same(tiny_w4a8: Path, tiny_source: Path) -> None:
    report = verify(str(tiny_w4a8), against=str(tiny_source))
    shown = json.loads(in_process("verify", tiny_w4a8, "--against", tiny_source, "--json").stdout)
    assert report.to_dict() == shown
    assert report.ok is shown["ok"] is True
