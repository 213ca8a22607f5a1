"""`from glm5_ascend.verify import verify`: what the command calls, with its names and defaults."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_ascend.cli import verify as command
from glm5_ascend.verify import CheckpointFinding, Report, WeightError, verify
from tests.support.command import in_process

#: How the command prints; not what it does.
PRINTING = {"as_json", "quiet"}


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


def test_options_have_the_names_and_defaults_of_the_command() -> None:
    ours, theirs = (inspect.signature(function).parameters for function in (verify, command.verify))
    for name in theirs.keys() - PRINTING:
        assert ours[name].default == theirs[name].default
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ours if name != "directory")


def test_python_and_command_say_the_same(tiny_w4a8: Path, tiny_source: Path) -> None:
    report = verify(str(tiny_w4a8), against=str(tiny_source))
    shown = json.loads(in_process("verify", tiny_w4a8, "--against", tiny_source, "--json").stdout)
    assert report.to_dict() == shown == report.to_json()
    assert report.ok is shown["ok"] is True
