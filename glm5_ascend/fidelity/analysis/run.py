"""All main layers of a source under a recipe, on calibration text, layer by layer and expert by expert.

Measured: for every linear its errors on real inputs, for every unit the energy its rounding alone adds to the residual
stream of its layer. Assumed: that units add up, that noise of the same relative energy costs the same in every layer,
and that FLOAT costs nothing (bf16 rounding of rotated weights is left out). MTP layers are not looked at.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckFailedError, RecipeError
from glm5_ascend.fidelity.analysis.layer import LayerAnalysis, LayerReport
from glm5_ascend.fidelity.analysis.outliers import Unrotated
from glm5_ascend.model import structure
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.structure import Linear
from glm5_ascend.quantize.calibration.dataset import CalibrationSet, find_dataset, load_calibration
from glm5_ascend.quantize.calibration.forward import Selections
from glm5_ascend.quantize.calibration.row_file import Stream
from glm5_ascend.quantize.plan import Plan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.workers import Workers


class Progress(Protocol):
    """Where progress goes."""

    def begin(self, layers: int, experts: int) -> None: ...
    def expert(self, layer: int, expert: int) -> None: ...
    def layer(self, layer: int, note: str) -> None: ...


@dataclass(frozen=True)
class Options:
    """`calib`, `samples`, `seq_len`, `seed`, `threads`: as for quantize."""

    source: Path
    recipe: str = "w4a8"
    calib: Path | None = None
    samples: int = 32
    seq_len: int = 512
    seed: int = 1234
    threads: int | None = None


@dataclass
class Analysis:
    """What was found; `recipe_path` and `plan` are those of the recipe that was looked at."""

    options: Options
    recipe_path: Path
    plan: Plan
    tokens: int
    layers: list[LayerReport] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """A checked job: nothing has been computed yet."""

    options: Options
    recipe_path: Path
    plan: Plan
    calibration: CalibrationSet


def prepare(options: Options) -> Prepared:
    """Check source, recipe and text.

    Raises:
        Glm5Error: the first thing that would make the analysis fail.
    """
    path = find_recipe(options.recipe)
    recipe, source = load_recipe(path), SourceCheckpoint(options.source)
    plan = Plan(source, recipe)
    dataset = find_dataset(recipe.spec.dataset, stock=recipe.apiversion == "modelslim_v1").path
    calib = options.calib or dataset
    if not calib.is_file():
        raise RecipeError(f"{calib}: no such calibration file", "give one with --calib")
    text = load_calibration(calib, options.source, source.config.vocab_size, options.samples, options.seq_len)
    return Prepared(options, path, plan, text)


@torch.no_grad()
def analyze(job: Prepared, progress: Progress) -> Analysis:
    """Run a prepared job; activations lie in a temporary folder (TMPDIR) meanwhile.

    Raises:
        CheckFailedError: NaN or infinity in the residual stream.
    """
    plan, config, calibration = job.plan, job.plan.config, job.calibration
    rotations = Rotations(config, job.options.seed) if plan.recipe.rotates else None
    weights = FloatWeights(plan.source, rotations, torch.device("cpu"))
    unrotated = Unrotated(rotations)
    found = Analysis(job.options, job.recipe_path, plan, calibration.tokens)
    lengths = tuple(len(sequence) for sequence in calibration.sequences)
    threads = job.options.threads or len(os.sched_getaffinity(0))
    progress.begin(config.num_hidden_layers, config.n_routed_experts)
    with tempfile.TemporaryDirectory(prefix="glm5-analyze-") as name, Workers(threads) as workers:
        folder = Path(name)
        selections = Selections(config, folder, lengths)
        here = Stream(folder / "stream-0", lengths, config.hidden_size)
        table = structure.find(structure.GLOBAL, "model.embed_tokens")
        assert isinstance(table, Linear)
        for number, sequence in enumerate(calibration.sequences):
            here.set_sequence(number, weights.lookup("", table, sequence))
        for layer in range(config.num_hidden_layers):
            out = Stream(folder / f"stream-{layer + 1}", lengths, config.hidden_size)
            step = LayerAnalysis(plan, weights, layer, here, out, selections, workers, folder)
            report = step.run(unrotated, lambda expert, layer=layer: progress.expert(layer, expert + 1))  # type: ignore[misc]
            if not all(torch.isfinite(torch.tensor(list(unit.noise.values()))).all() for unit in report.units):
                raise CheckFailedError(f"{job.options.source}: layer {layer}: NaN or infinity", "check the source")
            found.layers.append(report)
            here.file.remove()
            here = out
            progress.layer(layer, f"noise {report.noise**0.5:.4f}")
        here.file.remove()
        if selections.file is not None:
            selections.file.close()
    return found
