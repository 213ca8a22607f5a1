"""Between a kill and the second run somebody was at the workshop: what is damaged is done again, to the same bytes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from glm5_ascend.checkpoint.output import workshop
from glm5_ascend.errors import OutputError
from glm5_ascend.quantize.pipeline import prepare, quantize
from glm5_ascend.quantize.progress import silent
from tests.quantize.run.test_resume import StopsAfter, options
from tests.quantize.support.kill_runs import digest
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model


class Stopped(NamedTuple):
    """`place`: the workshop of a run that was stopped in its third layer; `whole`: what comes out of a whole run."""

    source: Path
    calib: Path
    recipe: str
    place: Path
    whole: str


@pytest.fixture(scope="module", params=["w8a8", "shared indexer", "rtn-w4a8"])
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    source = write_tiny_model(folder / "source", **(SHARED_INDEXER if request.param == "shared indexer" else {}))
    calib = write_calibration(folder / "calib.jsonl")
    recipe = "rtn-w4a8" if request.param == "rtn-w4a8" else "w8a8"  # that one needs no calibration
    whole, broken = folder / "whole" / "out", folder / "broken" / "out"
    whole.parent.mkdir(), broken.parent.mkdir()
    quantize(prepare(options(source, whole, calib, recipe=recipe)), silent)
    with pytest.raises(KeyboardInterrupt):
        quantize(prepare(options(source, broken, calib, recipe=recipe)), StopsAfter(6))
    return Stopped(source, calib, recipe, workshop(broken), digest(whole))


def first_shard(place: Path) -> Path:
    return sorted((place / "checkpoint").glob("quant_model_weights-*.safetensors"))[0]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def in_a_finished_layer(path: Path) -> int:
    """A byte of the first layer, which was finished."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.startswith("model.layers.0.") and name.endswith(".weight"))
    return 8 + length + int(header[name]["data_offsets"][0])


def replaced_by_link(path: Path, hard: bool) -> None:
    theirs = path.parent.parent.parent / "theirs.bin"
    shutil.copyfile(path, theirs)
    path.unlink()
    os.link(theirs, path) if hard else path.symlink_to(theirs)


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda place: None,
    "deleted shard": lambda place: first_shard(place).unlink(),
    "truncated shard": lambda place: os.truncate(first_shard(place), 5000),
    "empty shard": lambda place: os.truncate(first_shard(place), 0),
    "zeroed shard": lambda place: first_shard(place).write_bytes(bytes(first_shard(place).stat().st_size)),
    "a byte of a finished layer": lambda place: flip(first_shard(place), in_a_finished_layer(first_shard(place))),
    "a byte of the header": lambda place: flip(first_shard(place), 20),
    "a longer shard": lambda place: os.truncate(first_shard(place), first_shard(place).stat().st_size + 64),
    "a link": lambda place: replaced_by_link(first_shard(place), hard=False),
    "a second name": lambda place: replaced_by_link(first_shard(place), hard=True),
    "a pipe": lambda place: replaced_by_pipe(first_shard(place)),
    "no activations": lambda place: shutil.rmtree(place / "activations"),
    "damaged activations": lambda place: [
        path.write_bytes(bytes(path.stat().st_size)) for path in (place / "activations").iterdir()
    ],
    "activations elsewhere": lambda place: (
        shutil.move(place / "activations", place.parent / "moved"),
        (place / "activations").symlink_to(place.parent / "moved"),
    ),
    "no journal": lambda place: (place / "journal.jsonl").unlink(),
    "a forged line": lambda place: (place / "journal.jsonl").open("a").write('{"unit": "layer 2"}\n'),
    "no checkpoint": lambda place: shutil.rmtree(place / "checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_done_again(damage: str, stopped: Stopped, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place = workshop(out)
    shutil.copytree(stopped.place, place)
    DAMAGE[damage](place)
    theirs = tmp_path / "theirs.bin"
    before = theirs.read_bytes() if theirs.exists() else b""
    said: list[str] = []
    job = options(stopped.source, out, stopped.calib, recipe=stopped.recipe)
    quantize(prepare(job), lambda text, _done, _total: said.append(text))
    assert digest(out) == stopped.whole
    assert not place.exists()
    assert (theirs.read_bytes() if theirs.exists() else b"") == before
    lost = any("damaged: done again" in text for text in said)
    assert lost == (damage not in HARMLESS and (damage not in NEED_CALIBRATION or stopped.recipe != "rtn-w4a8"))


#: The journal goes with them, or nothing that it names is touched.
HARMLESS = ("nothing", "no journal", "a byte of the header", "a longer shard", "a forged line")
NEED_CALIBRATION = ("no activations", "damaged activations", "activations elsewhere")


def test_a_strange_file_is_not_published(stopped: Stopped, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped.place, workshop(out))
    strange = workshop(out) / "checkpoint" / "notes.txt"
    strange.write_text("mine")
    job = options(stopped.source, out, stopped.calib, recipe=stopped.recipe)
    with pytest.raises(OutputError, match=r"notes\.txt: not written by this run") as error:
        quantize(prepare(job), silent)
    assert "move it away" in error.value.tip and strange.read_text() == "mine" and not out.exists()
    strange.unlink()
    quantize(prepare(job), silent)
    assert digest(out) == stopped.whole
