"""A run that was stopped anywhere is resumed and ends with the bytes of one that was not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.checkpoint.output import run_dir_of
from glm5_ascend.errors import OutputError
from glm5_ascend.quantize import pipeline
from glm5_ascend.quantize.job import open_job
from glm5_ascend.quantize.methods import gptq
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.pipeline import quantize
from glm5_ascend.quantize.progress import silent
from glm5_ascend.quantize.run.journal import GLOBALS, Journal, UnitRecord, WorkUnit
from tests.quantize.support import kill_runs
from tests.quantize.support.kill_runs import digest
from tests.support.command import said
from tests.support.tiny_flash import write_tiny_flash
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model


class StopsAfter:
    """Progress that presses Ctrl-C after so many finished experts."""

    def __init__(self, experts: int) -> None:
        self.left = experts

    def __call__(self, text: str, done: float, total: int) -> None:
        self.left -= "expert" in text
        if self.left == 0:
            raise KeyboardInterrupt


def options(source: Path, out: Path, calib: Path, **changes: Any) -> QuantizeOptions:
    return QuantizeOptions(source, out, **{"recipe": "w8a8", "calib": calib, "samples": 3, "seq_len": 64} | changes)


SOURCES: dict[str, Callable[[Path], Path]] = {
    "plain": write_tiny_model,
    "shared indexer": partial(write_tiny_model, **SHARED_INDEXER),
    "flash": write_tiny_flash,
}


@pytest.mark.parametrize(
    ("kind", "recipe"), [("shared indexer", "w8a8"), ("plain", "w4a8-best"), ("flash", "flash-w4a8-best")]
)
def test_stopped_after_every_few_experts(kind: str, recipe: str, tmp_path: Path) -> None:
    """Static W8A8 quantizes the MTP layer's attention too: the stream reaches the very last layer."""
    source = SOURCES[kind](tmp_path / "source")
    calib = write_calibration(tmp_path / "calib.jsonl")
    whole, broken = tmp_path / "whole" / "out", tmp_path / "broken" / "out"
    whole.parent.mkdir(), broken.parent.mkdir()
    quantize(open_job(options(source, whole, calib, recipe=recipe)), silent)
    stops = 0
    while not broken.exists():
        try:
            quantize(open_job(options(source, broken, calib, recipe=recipe)), StopsAfter(7))  # a layer has four
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2
    assert digest(broken) == digest(whole)
    assert list(broken.parent.iterdir()) == [broken]


def test_wide_linears_resumed_with_other_threads(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More columns than GPTQ keeps inputs, so that it works in their strongest directions."""
    monkeypatch.setattr(gptq, "FULL_COLUMNS", 24)
    monkeypatch.setattr(gptq, "MAX_ROWS", 24)
    monkeypatch.setattr(gptq, "RANK", 8)
    calib = write_calibration(tmp_path / "calib.jsonl")
    asked = {"recipe": "w4a8-best"}
    whole, broken = tmp_path / "whole" / "out", tmp_path / "broken" / "out"
    whole.parent.mkdir(), broken.parent.mkdir()
    quantize(open_job(options(tiny_source, whole, calib, **asked, threads=1)), silent)
    with pytest.raises(KeyboardInterrupt):
        quantize(open_job(options(tiny_source, broken, calib, **asked, threads=3)), StopsAfter(2))
    quantize(open_job(options(tiny_source, broken, calib, **asked, threads=2)), silent)
    assert digest(broken) == digest(whole)


def test_stopped_just_before_its_end(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written, the provenance too; only the new name is missing."""
    calib = write_calibration(tmp_path / "calib.jsonl")
    whole, broken = tmp_path / "whole" / "out", tmp_path / "broken" / "out"
    whole.parent.mkdir(), broken.parent.mkdir()
    quantize(open_job(options(tiny_source, whole, calib)), silent)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(open_job(options(tiny_source, broken, calib)), silent)
    quantize(open_job(options(tiny_source, broken, calib)), silent)
    assert digest(broken) == digest(whole)


@pytest.mark.parametrize(
    ("kind", "recipe", "kills"),
    [
        ("plain", "w4a8", 2),
        pytest.param("plain", "w4a8", 20, marks=pytest.mark.long),
        pytest.param("flash", "flash-w4a8-best", 10, marks=pytest.mark.long),
    ],
)
def test_killed_again_and_again(kind: str, recipe: str, kills: int, tmp_path: Path) -> None:
    source, calib = SOURCES[kind](tmp_path / "source"), write_calibration(tmp_path / "calib.jsonl")
    said(sys.executable, kill_runs.__file__, source, calib, tmp_path / "runs", recipe, kills)


@pytest.mark.parametrize(
    ("change", "word"), [({"seed": 7}, "seed"), ({"samples": 2}, "calibration"), ({"recipe": "w4a8"}, "recipe")]
)
def test_another_job_does_not_resume(change: dict[str, Any], word: str, tiny_source: Path, tmp_path: Path) -> None:
    calib, out = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(open_job(options(tiny_source, out, calib)), StopsAfter(2))
    with pytest.raises(OutputError, match=f"unfinished run with another {word}") as error:
        quantize(open_job(options(tiny_source, out, calib, **change)), silent)
    assert "--restart" in error.value.tip
    assert not out.exists()
    quantize(open_job(options(tiny_source, out, calib, **change, restart=True)), silent)
    assert out.exists()
    assert not run_dir_of(out).exists()


def test_a_touched_source_is_not_resumed(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    calib, out = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(open_job(options(source, out, calib)), StopsAfter(2))
    next(source.glob("*.safetensors")).touch()
    with pytest.raises(OutputError, match="modification times of the source"):
        quantize(open_job(options(source, out, calib)), silent)


def test_a_torn_line_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"seed": 1})
    journal.finish(GLOBALS)
    journal.finish(WorkUnit.backbone(0), UnitRecord({"W8A8": (1.5, 2.5)}))
    journal.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole), 3):
        path.write_bytes(whole[:-cut])
        again = Journal(path, {"seed": 1})
        assert len(again) == whole[:-cut].count(b"\n") - 1 or not len(again)
        again.finish(WorkUnit("after"))
        again.close()
        assert json.loads(path.read_text().splitlines()[-1]) == {"unit": "after"}
