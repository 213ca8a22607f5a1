"""Method yaqa: stopped anywhere, damaged, by any number of threads, the same bytes; and what refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from glm5_ascend.checkpoint.output import workshop
from glm5_ascend.errors import RecipeError
from glm5_ascend.quantize.pipeline import prepare, quantize
from glm5_ascend.quantize.progress import silent
from glm5_ascend.quantize.recipe import find_recipe, recipe_content
from tests.quantize.run.test_damaged import Lines
from tests.quantize.run.test_resume import StopsAfter, options
from tests.quantize.support.kill_runs import digest
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model

RECIPE = "w4a8-yaqa"


class StopsAt:
    """Progress that presses Ctrl-C when it hears a text for the first time."""

    def __init__(self) -> None:
        self.heard: set[str] = set()

    def __call__(self, text: str, done: float, total: int) -> None:
        if text.startswith("gradients") and text not in self.heard:
            self.heard.add(text)
            raise KeyboardInterrupt


class Job:
    """A model, a text, and the bytes that an undisturbed run makes of them."""

    def __init__(self, folder: Path) -> None:
        self.source = write_tiny_model(folder / "source", **SHARED_INDEXER)
        self.calib = write_calibration(folder / "calib.jsonl")
        (folder / "whole").mkdir()
        self.run(folder / "whole" / "out", threads=1)
        self.digest = digest(folder / "whole" / "out")

    def run(self, out: Path, progress: object = silent, threads: int = 2) -> None:
        asked = options(self.source, out, self.calib, recipe=RECIPE, threads=threads)
        quantize(prepare(asked), progress)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("yaqa"))


def test_stopped_at_every_step_of_the_sweep(job: Job, tmp_path: Path) -> None:
    """Each attempt gets one step further, with another number of threads."""
    out, stops, attempts = tmp_path / "out", StopsAt(), 0
    while not out.exists():
        attempts += 1
        try:
            job.run(out, stops, threads=1 + attempts % 3)
        except KeyboardInterrupt:
            continue
    assert attempts == 1 + 4 + 1 + 3  # forward, output, backward
    assert digest(out) == job.digest
    assert list(tmp_path.iterdir()) == [out]


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "stopped"),
    [("sweep-stream-2", 2), ("sweep-gradient-3", 2), ("outputs-3.safetensors", 2), ("sweep-selections-2", 3)],
)
def test_damaged_files_of_the_sweep_are_made_again(name: str, stopped: int, job: Job, tmp_path: Path) -> None:
    """Files that the sweep needs where it stopped: when it had begun with the backward of layer `stopped`."""
    out, stops = tmp_path / "out", StopsAt()
    stops.heard = {f"gradients: layer {layer} of 4 forward" for layer in range(4)} | {"gradients: output"}
    stops.heard |= {f"gradients: layer {layer} of 4 backward" for layer in range(stopped + 1, 4)}
    with pytest.raises(KeyboardInterrupt):
        job.run(out, stops)
    damaged(workshop(out) / "activations" / name)
    lines = Lines()
    job.run(out, lines)
    assert "gradients: layer 0 of 4 forward" in lines.texts
    assert digest(out) == job.digest


def test_gradients_damaged_while_experts_are_rounded(job: Job, tmp_path: Path) -> None:
    """What was rounded stays; what comes is rounded with the same gradients, made again."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        job.run(out, StopsAfter(2))
    damaged(workshop(out) / "activations" / "outputs-2.safetensors")
    lines = Lines()
    job.run(out, lines)
    assert "gradients: output" in lines.texts and "layer 1 expert 0" in lines.texts
    assert digest(out) == job.digest


def test_a_finished_sweep_is_not_done_again(job: Job, tmp_path: Path) -> None:
    out, lines = tmp_path / "out", Lines()
    with pytest.raises(KeyboardInterrupt):
        job.run(out, StopsAfter(6))
    left = {path.name for path in (workshop(out) / "activations").glob("*") if not path.name.startswith("stream")}
    assert left >= {f"outputs-{layer}.safetensors" for layer in (1, 2, 3)}
    assert not any(name.startswith("sweep") for name in left)
    job.run(out, lines)
    assert not any(text.startswith("gradients") for text in lines.texts)
    assert digest(out) == job.digest


def test_a_finished_sweep_behind_several_dense_layers(tmp_path: Path) -> None:
    """The streams in front of the first MoE layer are gone, too, and nobody asks for them; nor for what a kill left."""
    source = write_tiny_model(tmp_path / "source", num_hidden_layers=4, first_k_dense_replace=3)
    out, calib, lines = tmp_path / "run" / "out", write_calibration(tmp_path / "calib.jsonl"), Lines()
    out.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        quantize(prepare(options(source, out, calib, recipe=RECIPE)), StopsAfter(2))
    activations = workshop(out) / "activations"
    assert not list(activations.glob("sweep-*"))
    (activations / "sweep-stream-2").write_bytes(bytes(100))

    def progress(text: str, done: float, total: int) -> None:
        lines(text, done, total)
        assert "expert" not in text or not list(activations.glob("sweep-*"))

    quantize(prepare(options(source, out, calib, recipe=RECIPE)), progress)
    assert not any(text.startswith("gradients") for text in lines.texts)


def recipe_with(folder: Path, changed: str) -> str:
    """The shipped recipe, yaqa where it cannot be."""
    recipe = recipe_content(find_recipe(RECIPE))
    linears = next(step for step in recipe["spec"]["process"] if step["type"] == "group")["configs"]
    if changed == "attention":
        linears[0]["qconfig"]["weight"]["method"] = "yaqa"
    elif changed == "INT8 experts":
        linears[2]["qconfig"]["weight"]["dtype"] = "int8"
    else:
        linears[2]["exclude"] = []
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


@pytest.mark.parametrize("changed", ["attention", "INT8 experts", "the MTP layer"])
def test_refused_where_there_are_no_gradients(changed: str, job: Job, tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, changed)
    with pytest.raises(RecipeError, match="method yaqa exists for INT4 experts of the main model only") as error:
        prepare(options(job.source, tmp_path / "out", job.calib, recipe=recipe))
    assert error.value.tip == "use gptq here"
