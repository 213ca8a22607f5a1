"""EleutherAI's lm-evaluation-harness, as glm5_ascend/fidelity/README.md runs it, against the real server: offline."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5_ascend.demo_model.resources import write_demo_model
from tests.contract.support.peers import interpreter_with
from tests.support.command import ROOT, in_process
from tests.support.documents import document, shell_lines
from tests.support.server_process import started_server

pytestmark = pytest.mark.contract
COMMANDS = [line for line in shell_lines(document("glm5_ascend/fidelity/README.md")) if line.startswith("lm_eval ")]


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the program; LM_EVAL_PYTHON names an interpreter that has it already."""
    folder = tmp_path_factory.mktemp("lm_eval") / "venv"
    return interpreter_with("LM_EVAL_PYTHON", folder, "lm-eval[api]==0.4.12", "transformers==5.19.0").parent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """(W4A8 checkpoint of the demo model, URL of the server that serves it)."""
    folder = tmp_path_factory.mktemp("served")
    source = write_demo_model(folder / "glm5")
    assert in_process("quantize", source, folder / "w4a8", "--quiet").returncode == 0
    for url in started_server(folder / "w4a8", folder, []):
        yield folder / "w4a8", url


def test_the_command_of_the_readme(lm_eval: Path, served: tuple[Path, str], tmp_path: Path) -> None:
    (line,) = COMMANDS
    checkpoint, url = served
    words = shlex.split(line.replace("work/glm5-w4a8", str(checkpoint)).replace("http://127.0.0.1:8000", url))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    program = shutil.which("lm_eval", path=str(lm_eval))
    assert program is not None and words[0] == "lm_eval"
    done = subprocess.run(
        [program, *words[1:], "--output_path", str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT,
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"}, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text())
    assert results["n-samples"]["demo_lookup"]["effective"] == 40
    assert results["results"]["demo_lookup"]["acc,none"] >= 0.8  # chance: 0.36
