"""The contract tests of vllm-ascend with its newest pre-release on PyPI, and which of them it breaks.

    python -m tests.contract.newest FOLDER        # `make test-newest`; FOLDER gets the environment and pytest's report

Ends with 0 if nothing broke, or if the newest is one of the supported lines; else with 1. An environment that lies in
FOLDER already is used as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from glm5_ascend.deploy.rehearsal.environment import NEWEST, REQUIREMENTS, newest_version, prepare
from glm5_ascend.errors import MissingEnvironmentError
from tests.contract.support.vllm_ascend import NEWEST as VARIABLE
from tests.support.command import ROOT

#: Files whose tests ask for `line`.
TESTS = (
    "test_profiles_accepted.py", "test_vllm_ascend_loader.py", "test_vllm_ascend_attention.py",
    "test_plugin_with_vllm_ascend.py",
)  # fmt: skip
SUPPORTED = [Version(packages[0].partition("==")[2]) for packages in REQUIREMENTS.values()]


def environment(folder: Path) -> Path | None:
    """The interpreter, made if it is not there; None where there is nothing to try."""
    python = folder / "env/bin/python"
    if not python.is_file():
        version = newest_version(Path(sys.executable))
        if version in SUPPORTED:
            print(f"the newest on PyPI is {version}, which is a supported line: nothing to try")
            return None
        print(f"trying vllm-ascend {version}")
        prepare(folder / "env", print, NEWEST)
    return python


def broken(report: Path) -> Iterator[str]:
    """A line per test that did not pass: its name, and the first line of its error."""
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (element := case.find(kind)) is not None:
                message = (element.get("message") or element.text or "no message").strip().splitlines()
                yield f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}: {message[0][:300]}"


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = environment(folder)
    except MissingEnvironmentError as error:
        print(f"broken: its environment: {error}")
        return 1
    if python is None:
        return 0
    report = folder / "report.xml"
    files = [str(ROOT / "tests/contract" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "contract", f"--junitxml={report}", "--tb=no", *files]
    subprocess.run(command, env=os.environ | {VARIABLE: str(python)}, cwd=ROOT, check=False)
    lines = list(broken(report))
    print(*(f"broken: {line}" for line in lines), f"{len(lines)} tests broken", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
