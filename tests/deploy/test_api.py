"""`doctor`, `render`, `serve` as functions: the commands' options by name and default, the same data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glm5_ascend.deploy
import glm5_ascend.serve
from glm5_ascend import cli
from glm5_ascend.deploy import doctor, render
from glm5_ascend.errors import ConfigError, OutputError
from glm5_ascend.serve import serve


def test_doctor_returns_what_its_command_prints(tiny_w4a8: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor(str(tiny_w4a8), profile="a3-single-w4a8").to_dict()
    code = cli.run(["doctor", str(tiny_w4a8), "--profile", "a3-single-w4a8", "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert report["exit_code"] == code and report["verdict"] and report["rows"]


def test_errors_are_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no profile 'a4'"):
        doctor(profile="a4")
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        serve(str(tmp_path / "nowhere"), dry_run=True)
    with pytest.raises(OutputError, match="exists and is not empty"):
        render("a3-1m", to="shell", out=str(tmp_path))
    with pytest.raises(ConfigError, match="--to nomad"):
        render("a3-1m", "nomad", out=str(tmp_path / "absent"))


def test_other_names_are_attribute_errors() -> None:
    for package in (glm5_ascend.deploy, glm5_ascend.serve):
        with pytest.raises(AttributeError, match="no attribute 'absent'"):
            _ = package.absent
