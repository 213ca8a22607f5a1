"""The folder for compiled kernels: which is taken, and that nobody else can put code into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from glm5_kernels import cache


@pytest.fixture(autouse=True)
def installed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's folders cannot be written, and nothing of this machine's is seen."""
    monkeypatch.setattr(cache, "_beside_is_writable", lambda: False)
    monkeypatch.setattr(cache, "SHARED_MEMORY", tmp_path / "shm")
    for name, folder in (("HOME", "home"), ("TMPDIR", "tmp"), ("XDG_CACHE_HOME", "home/.cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
        (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv(cache.VARIABLE, raising=False)


def occupied(path: Path) -> Path:
    """A file where a folder is wanted: no user can write into it, root included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "named"))
    assert cache.choose() == cache.Place(tmp_path / "named", cache.VARIABLE)
    monkeypatch.delenv(cache.VARIABLE)
    first = cache.choose()
    assert first.folder == tmp_path / "home/.cache/glm5-ascend/kernels" and not first.beside
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied(tmp_path / "file")))
    ours = f"glm5-kernels-{os.geteuid()}"
    assert cache.choose().folder == tmp_path / "tmp" / ours
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "file"))
    assert cache.choose().folder == tmp_path / "shm" / ours
    monkeypatch.setattr(cache, "SHARED_MEMORY", tmp_path / "file")
    assert cache.choose().folder is None


def test_writable_package_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "_beside_is_writable", lambda: True)
    assert cache.choose() == cache.Place(cache.PACKAGE, "beside the source", beside=True)


def test_folder_is_private(tmp_path: Path) -> None:
    folder = cache.choose().folder
    assert folder is not None and folder.stat().st_mode & 0o077 == 0


def test_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = cache.choose().folder
    assert folder is not None
    folder.chmod(0o777)
    assert cache.choose().folder == tmp_path / "tmp" / f"glm5-kernels-{os.geteuid()}"


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    mine = tmp_path / "home/.cache/glm5-ascend"
    mine.mkdir(parents=True)
    (mine / "kernels").symlink_to(tmp_path / "theirs")
    assert cache.choose().folder != mine / "kernels"


def test_unknown_home_makes_no_folder_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: Path("~/.cache") / name)  # no such user
    assert cache.choose().folder == tmp_path / "tmp" / f"glm5-kernels-{os.geteuid()}"
    assert not (tmp_path / "~").exists()


def test_named_folder_that_can_only_be_read_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "image"
    (image / "compiled_1").mkdir(parents=True)
    for name in ("simd.lined-1.py311.nbi", "simd.lined-1.py311.1.nbc", "other.txt"):
        (image / "compiled_1" / name).write_text(name)
    usable = cache._usable
    monkeypatch.setattr(cache, "_usable", lambda folder, private=False: folder != image and usable(folder, private))
    monkeypatch.setenv(cache.VARIABLE, str(image))
    place = cache.choose()
    assert place.seed == image and place.folder is not None
    cache.copy_compiled(image, place.folder)
    found = sorted(path.name for path in (place.folder / "compiled_1").iterdir())
    assert found == ["simd.lined-1.py311.1.nbc", "simd.lined-1.py311.nbi"]
    assert cache.count_compiled(place)[0] == 1


def test_seconds_count_what_is_compiled_within_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    counted, now = cache.Compilation(), iter([10.0, 14.0])
    counted.say = said.append
    monkeypatch.setattr(cache.time, "monotonic", lambda: next(now))
    for _ in range(2):
        counted.began()
    for _ in range(2):
        counted.ended()
    assert (counted.functions, counted.seconds, said) == (2, 4.0, [cache.MESSAGE])


MODULE = """
from typing import NamedTuple
from glm5_kernels import cache
cache.prepare()
import numpy as np
from numba import njit

class NAME(NamedTuple):
    x: object

@njit(cache=True)
def double(pair):
    return 2 * pair.x[0]

print(double(NAME(np.ones(1))))
"""


def test_a_class_that_has_another_name_now_is_no_end(tmp_path: Path) -> None:
    """As after an update of the package: the index in the cache names a class that is gone."""
    script = tmp_path / "kernel.py"
    environment = {**os.environ, cache.VARIABLE: str(tmp_path / "compiled")}
    for name in ("Before", "After", "After"):
        script.write_text(MODULE.replace("NAME", name))
        command = [sys.executable, "-c", "import kernel"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert list((tmp_path / "compiled").rglob("*.nbi"))
