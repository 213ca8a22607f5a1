"""The base package on the other Pythons it is declared for: installed, and quantize writes the same bytes as here."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import install_cpu
from glm5_ascend.deploy.rehearsal.environment import install
from tests.support.command import ROOT, glm5_ascend

#: Of what runs these tests there is no need for a second look.
VERSIONS = ("3.12", "3.13")


def interpreter(version: str) -> str | None:
    """PYTHON_3_12 and the like name one; else what is called so."""
    named = os.environ.get(f"PYTHON_{version.replace('.', '_')}") or shutil.which(f"python{version}")
    if not named:
        return None
    works = subprocess.run([named, "-c", "import venv"], capture_output=True, check=False)
    return named if works.returncode == 0 else None


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.contract
@pytest.mark.parametrize("version", VERSIONS)
def test_quantize_writes_the_same_bytes(version: str, tmp_path: Path) -> None:
    base = interpreter(version)
    if base is None:
        pytest.skip(f"no python{version} here: PYTHON_{version.replace('.', '_')} names one")
    subprocess.run([base, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env/bin/python"
    try:
        flags = install_cpu.torch_flags(python)
    except install_cpu.InstallError as error:
        pytest.skip(f"no CPU torch for Python {version}: {error}")
    torch = f"torch=={install_cpu.TORCH}+cpu"
    install(python, torch, str(ROOT), "--constraint", str(ROOT / "deploy/constraints.txt"), *flags)
    model, theirs, ours = tmp_path / "model", tmp_path / "theirs", tmp_path / "ours"
    for words in (["demo-model", model], ["quantize", model, theirs], ["verify", theirs, "--against", model]):
        command = [str(python.parent / "glm5-ascend"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    assert glm5_ascend("quantize", model, ours).returncode == 0
    assert digests(theirs) == digests(ours)
