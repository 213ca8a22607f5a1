"""What the job with the newest pre-release says of tests that break; the job itself is `make test-newest`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm5_ascend.deploy.rehearsal import environment
from glm5_ascend.errors import MissingEnvironmentError
from tests.contract import newest
from tests.support.command import ROOT

SUITE = """
import pytest

def test_good(): pass

def test_bad():
    raise ValueError("no such switch")

@pytest.fixture
def gone(): raise RuntimeError("it does not start")

def test_none(gone): pass
"""


def test_each_broken_test_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path)]
    subprocess.run([*command, "--rootdir", str(tmp_path)], check=False, capture_output=True, cwd=tmp_path)
    first, second = newest.broken(report)
    assert "::test_bad: ValueError: no such switch" in first
    assert "::test_none: " in second and "it does not start" in second


def test_a_supported_line_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newest, "newest_version", lambda python: newest.SUPPORTED[-1])
    assert newest.main(tmp_path / "new") == 0
    assert f"the newest on PyPI is {newest.SUPPORTED[-1]}" in capsys.readouterr().out


def test_pip_that_knows_no_versions_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no index' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(MissingEnvironmentError, match="no index"):
        environment.newest_version(python)
    python.write_text("#!/bin/sh\necho 'vllm-ascend (0.31.0rc1)'\n")
    assert str(environment.newest_version(python)) == "0.31.0rc1"


def test_its_tests_ask_for_the_line() -> None:
    for name in newest.TESTS:
        assert "line: VllmAscend" in (ROOT / "tests/contract" / name).read_text("utf-8")
