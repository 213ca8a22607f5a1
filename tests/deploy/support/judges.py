"""Programs that judge rendered files: installed by apt or pip where they are missing and that is possible."""

from __future__ import annotations

import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import ran, said
from tests.support.programs import debian_program


def program(name: str, package: str) -> str:
    """Path of a Debian package's program; skips where it is missing and apt cannot install it."""
    path = debian_program(name, package)
    if path is None:
        pytest.skip(f"{name} is not installed (apt-get install {package})")
    return path


def tool_environment(folder: Path, *packages: str) -> Path:
    """Interpreter of a virtual environment that has `packages` from PyPI; skips where pip cannot get them."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    done = ran(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(packages)}: {done.stderr.strip().splitlines()[-1:]}")
    return python


#: An alert, its series of two hours (a sample a minute), and what fires then.
AlertCase = tuple[str, Mapping[str, str], list[dict[str, Any]]]


def judge_alerts(rules: Path, cases: Iterable[AlertCase]) -> None:
    """Let promtool say whether the alerts of a file of rules fire as the cases expect."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": "2h", "alertname": alert, "exp_alerts": firing}],
        }
        for alert, series, firing in cases
    ]
    text = yaml.safe_dump({"rule_files": [str(rules)], "tests": tests})
    said(program("promtool", "prometheus"), "test", "rules", "/dev/stdin", input=text)
