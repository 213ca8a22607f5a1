"""Files of a stopped run are not trusted: damaged ones are done again, and files of others stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.output import run_dir_of
from glm5_ascend.errors import OutputError
from glm5_ascend.quantize.job import open_job
from glm5_ascend.quantize.pipeline import quantize
from glm5_ascend.quantize.progress import silent
from tests.quantize.run.test_resume import StopsAfter, options
from tests.quantize.support.kill_runs import digest
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model


class Stopped:
    """A run that was stopped in its fourth layer, the result of an undisturbed one, and copies to damage."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.recipe = folder, recipe
        self.source = write_tiny_model(folder / "source", **SHARED_INDEXER)
        self.calib = write_calibration(folder / "calib.jsonl")
        (folder / "whole").mkdir(), (folder / "broken").mkdir()
        self.run(folder / "whole" / "out")
        with pytest.raises(KeyboardInterrupt):
            self.run(folder / "broken" / "out", StopsAfter(10))  # a layer has four

    def run(self, out: Path, progress: Callable[[str, float, int], None] = silent) -> None:
        quantize(open_job(options(self.source, out, self.calib, recipe=self.recipe)), progress)

    def copy(self, folder: Path) -> Path:
        """The stopped run once more; its OUT."""
        shutil.copytree(self.folder / "broken", folder / "run")
        return folder / "run" / "out"

    def resume(self, out: Path) -> list[str]:
        """The progress of the same command; it must end with the bytes of the undisturbed run."""
        texts: list[str] = []
        self.run(out, lambda text, done, total: texts.append(text))
        assert digest(out) == digest(self.folder / "whole" / "out")
        assert list(out.parent.iterdir()) == [out]
        return texts


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Static W8A8 calibrates the very last layer, too."""
    return Stopped(tmp_path_factory.mktemp("stopped"), "w8a8")


def shard_of(out: Path) -> Path:
    return next((run_dir_of(out) / "checkpoint").glob("*.safetensors"))


def test_intact_units_are_not_done_again(stopped: Stopped, tmp_path: Path) -> None:
    texts = stopped.resume(stopped.copy(tmp_path))
    assert "resuming an interrupted run: 3 of 5 layers are done" in texts
    assert not [text for text in texts if "again" in text or text.startswith(("layer 1 ", "layer 2 "))]


def damage(path: Path, kind: str, mine: Path) -> None:
    """Damage a file of the stopped run; `mine` gets a copy, a file of the user."""
    data = bytearray(path.read_bytes())
    mine.write_bytes(data)
    if kind == "a byte":
        data[16 + (int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0)] ^= 1
        path.write_bytes(data)
    elif kind == "header":
        data[30] ^= 1
        path.write_bytes(data)
    elif kind == "truncated":
        os.truncate(path, len(data) // 2)
    else:
        path.unlink()
        if kind == "link":
            path.symlink_to(mine)


@pytest.mark.parametrize("kind", ["deleted", "truncated", "a byte", "header", "link"])
def test_a_damaged_shard_is_done_again(kind: str, stopped: Stopped, tmp_path: Path) -> None:
    out, mine = stopped.copy(tmp_path), tmp_path / "mine"
    damage(shard_of(out), kind, mine)
    before = mine.read_bytes()
    texts = stopped.resume(out)
    assert mine.read_bytes() == before
    again = [text for text in texts if "are done again" in text]
    assert len(again) == (0 if kind == "header" else 1)
    if kind == "a byte":
        assert "; 1 units are damaged" in again[0]


@pytest.mark.parametrize(("name", "kind"), [("stream-3", "a byte"), ("stream-3", "deleted"), ("selections", "a byte")])
def test_damaged_activations_are_computed_again(name: str, kind: str, stopped: Stopped, tmp_path: Path) -> None:
    """The run was stopped in a layer that works on the selections of an earlier one; its weights stay."""
    out = stopped.copy(tmp_path)
    damage(run_dir_of(out) / "activations" / name, kind, tmp_path / "mine")
    texts = stopped.resume(out)
    assert any("the calibration restarts at the embedding" in text for text in texts)
    assert not any("done again" in text for text in texts)


def test_a_layer_of_another_run_does_not_count(stopped: Stopped, tmp_path: Path) -> None:
    """A journal that claims more than there is."""
    out = stopped.copy(tmp_path)
    journal = run_dir_of(out) / "journal.jsonl"
    lines = journal.read_text().splitlines()
    lines.append(json.dumps({"unit": "layer 3"}))
    lines.append(json.dumps({"checksum": "00000000", "unit": "layer 3 expert 3"}))
    lines.append(json.dumps({"checksum": "00000000", "unit": "../../mine"}))
    lines.append(json.dumps({"checksum": ["00000000"], "errors": {"W8A8": 3}, "unit": "layer 4 backbone"}))
    lines.append(json.dumps({"unit": ["layer 4"]}))
    lines.append(json.dumps({"strange": 1}))
    journal.write_text("".join(line + "\n" for line in lines))
    stopped.resume(out)


@pytest.mark.parametrize("name", ["journal.jsonl", "checkpoint/config.json", "activations/stream-4"])
def test_nothing_is_written_through_a_link(name: str, stopped: Stopped, tmp_path: Path) -> None:
    out, mine = stopped.copy(tmp_path), tmp_path / "mine"
    mine.write_text("mine")
    path = run_dir_of(out) / name
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
    stopped.resume(out)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint", "activations", "checkpoint/optional"])
def test_a_linked_folder_is_refused(name: str, stopped: Stopped, tmp_path: Path) -> None:
    out, mine = stopped.copy(tmp_path), tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    shutil.rmtree(run_dir_of(out) / name)
    (run_dir_of(out) / name).symlink_to(mine)
    with pytest.raises(OutputError, match=f"{name}: (not|already exists)"):
        stopped.run(out)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def test_a_file_of_the_user_is_not_published(stopped: Stopped, tmp_path: Path) -> None:
    out = stopped.copy(tmp_path)
    path = run_dir_of(out) / "checkpoint" / "thesis.txt"

    def put(text: str, done: float, total: int) -> None:
        if done == total:
            path.write_text("mine")

    with pytest.raises(OutputError, match=r"thesis\.txt: not written by this run"):
        stopped.run(out, put)
    path.rename(tmp_path / "thesis.txt")
    stopped.resume(out)


def test_a_file_of_the_user_beside_the_run_stays(stopped: Stopped, tmp_path: Path) -> None:
    out = stopped.copy(tmp_path)
    path = run_dir_of(out) / "thesis.txt"
    path.write_text("mine")
    stopped.run(out)
    assert path.read_text() == "mine" and out.is_dir()


def test_a_shard_replaced_during_the_run_is_noticed(stopped: Stopped, tmp_path: Path) -> None:
    out, mine = stopped.copy(tmp_path), tmp_path / "mine"

    def put(text: str, done: float, total: int) -> None:
        if done == total:
            damage(shard_of(out), "link", mine)

    with pytest.raises(OutputError, match="replaced while it was written"):
        stopped.run(out, put)
    stopped.resume(out)


def test_half_files_of_a_kill_are_removed(stopped: Stopped, tmp_path: Path) -> None:
    out = stopped.copy(tmp_path)
    for folder in (run_dir_of(out), run_dir_of(out) / "checkpoint"):
        (folder / ".config.json.1-2.glm5-ascend-partial").write_text("{")
    stopped.resume(out)
