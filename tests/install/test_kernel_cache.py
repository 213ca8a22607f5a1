"""The folder for compiled kernels: which one is used, and what happens where none can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_kernels import cache
from tests.support.command import ROOT, environment

CALL = "import torch; from glm5_kernels import ops; ops.hadamard(torch.ones(64, 256), torch.ones(64)); "


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cache.VARIABLE, raising=False)


def file_at(path: Path) -> Path:
    """A file where a folder is expected: no user can write into it, root included."""
    path.write_text("")
    return path


def test_order_of_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "named"))
    assert cache.folder() == tmp_path / "named"
    monkeypatch.setenv(cache.VARIABLE, str(file_at(tmp_path / "file")))
    default = cache.folder()
    assert default is not None and default.parent == tmp_path / "cache" / "glm5-ascend"
    assert default.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.folder() is None


def test_unknown_home_creates_no_folder_named_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache.folder() is None and not (tmp_path / "~").exists()


@pytest.mark.parametrize("writable", [True, False])
def test_kernels_are_compiled_once_per_folder(writable: bool, tmp_path: Path) -> None:
    """On a terminal a line says so. Without a folder every process compiles, and none fails."""
    folder = tmp_path / "named" if writable else file_at(tmp_path / "named")
    code = CALL + "from glm5_kernels.cache import compilation as c; print(c.functions > 0, c.seconds > 0)"
    outputs, messages = [], []
    variables = {cache.VARIABLE: str(folder), "XDG_CACHE_HOME": str(file_at(tmp_path / "none"))}
    for _ in range(2):
        done = subprocess.run(
            ["script", "-qec", f'{sys.executable} -c "{code}"', "/dev/null"], capture_output=True, text=True, cwd=ROOT,
            check=True, timeout=300, env=environment(**variables), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        outputs.append(done.stdout.splitlines()[-1])
        messages.append(done.stdout.count("compiling kernels for this processor, once"))
    assert outputs == ["True True", "False False" if writable else "True True"], done.stdout
    assert not writable or messages == [1, 0]
