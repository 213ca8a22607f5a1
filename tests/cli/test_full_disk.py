"""A command that runs out of disk leaves nothing; with room the same command works.

RLIMIT_FSIZE stands for the full disk: a write beyond it fails in the middle of a file, in this process only.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm5_ascend.errors import OutputError
from glm5_ascend.fidelity.analysis import recipe
from glm5_ascend.files.written import new_file, new_folder, write_file
from tests.support.command import assert_one_clear_line, in_process, worked


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process gets longer."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


COMMANDS = {
    "demo model": (["demo-model", "OUT/deep/model"], 1_000_000),
    "demo model in an empty folder": (["demo-model", "OUT"], 1_000_000),
    "render": (["deploy", "render", "--profile", "cpu", "--to", "shell", "--out", "OUT/deep/files"], 200),
    "plan": (["plan", "--model", "glm-5.1", "--quant", "w8a8c8", "--nodes", "4", "--html", "OUT/plan.html"], 5000),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_leaves_nothing(name: str, tmp_path: Path) -> None:
    words, size = COMMANDS[name]
    out = tmp_path / "out"
    out.mkdir()
    words = [word.replace("OUT", str(out)) for word in words]
    with largest_file(size):
        assert_one_clear_line(in_process(*words), 2, "cannot be written")
    assert list(out.rglob("*")) == []
    worked(in_process(*words))
    assert list(out.rglob("*")) and not list(out.rglob(".*"))


def test_an_older_file_stays_when_the_new_one_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "report"
    write_file(path, "old")
    with largest_file(100), pytest.raises(OutputError, match="report: cannot be written"):
        write_file(path, "x" * 1000)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_recipe_that_does_not_fit(tmp_path: Path) -> None:
    """What `analyze --out` writes."""
    with largest_file(100), pytest.raises(OutputError, match="cannot be written"):
        recipe.write(tmp_path / "recipe.yaml", {"spec": "x" * 500}, ["a comment"])
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report").symlink_to(tmp_path / "mine")
    write_file(tmp_path / "report", "new")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "report").read_text() == "new"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a" / "b") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
