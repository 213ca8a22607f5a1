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

import torch

from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckFailedError, RecipeError
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer, LayerAnalysis
from glm5_ascend.fidelity.analysis.outliers import Unrotated
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import Linear, find
from glm5_ascend.quantize.calibration.dataset import CalibrationSet, find_dataset, load_calibration
from glm5_ascend.quantize.calibration.forward import Selections
from glm5_ascend.quantize.calibration.row_file import Stream
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.workers import Workers


@dataclass
class Analysis:
    """What was found; `recipe_path` and `plan` are those of the recipe that was looked at, `text` is the file read."""

    options: AnalyzeOptions
    recipe_path: Path
    text: Path
    plan: QuantizationPlan
    tokens: int
    layers: list[AnalyzedLayer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PreparedAnalysis:
    """A checked job: nothing has been computed yet."""

    options: AnalyzeOptions
    recipe_path: Path
    text: Path
    plan: QuantizationPlan
    calibration: CalibrationSet
    notes: list[str] = field(default_factory=list)


def prepare(options: AnalyzeOptions) -> PreparedAnalysis:
    """Check source, recipe and text.

    Raises:
        Glm5Error: the first thing that would make the analysis fail.
    """
    path = find_recipe(options.recipe)
    recipe, source = load_recipe(path), SourceCheckpoint(Path(options.source))
    plan = QuantizationPlan(source, recipe)
    dataset = find_dataset(recipe.spec.dataset, stock=recipe.apiversion == "modelslim_v1")
    notes = [dataset.note] if options.calib is None and dataset.note else []
    calib = Path(options.calib or dataset.path)
    if not calib.is_file():
        raise RecipeError(f"{calib}: no such calibration file", "give one with --calib")
    text = load_calibration(calib, Path(options.source), source.config.vocab_size, options.samples, options.seq_len)
    if len(text.sequences[0]) <= (topk := source.config.index_topk):
        what = f"sequences of at most {options.seq_len} tokens tell nothing of the indexer, which keeps {topk} keys"
        if recipe.spec.fallback is not None and recipe.cache_steps:
            raise RecipeError(f"{what}: the recipe's rule keys_lost cannot be judged", f"give --seq-len {2 * topk}")
        notes.append(f"{what} (--seq-len {2 * topk})")
    return PreparedAnalysis(options, path, calib, plan, text, notes)


@torch.no_grad()
def analyze(prepared: PreparedAnalysis) -> Analysis:
    """Run a prepared job; activations lie in a temporary folder (TMPDIR) meanwhile.

    Raises:
        CheckFailedError: NaN or infinity in the residual stream.
    """
    plan, config, calibration = prepared.plan, prepared.plan.config, prepared.calibration
    progress = prepared.options.progress
    rotations = Rotations(config, prepared.options.seed) if plan.recipe.rotates else None
    weights = FloatWeights(plan.source, rotations, torch.device("cpu"))
    unrotated = Unrotated(rotations)
    found = Analysis(
        prepared.options, prepared.recipe_path, prepared.text, plan, calibration.tokens, notes=prepared.notes
    )
    lengths = tuple(len(sequence) for sequence in calibration.sequences)
    threads = prepared.options.threads or len(os.sched_getaffinity(0))
    count, experts = config.num_hidden_layers, config.n_routed_experts
    progress("embedding", 0, count)
    with tempfile.TemporaryDirectory(prefix="glm5-analyze-") as name, Workers(threads) as workers:
        folder = Path(name)
        selections = Selections(config, folder, lengths)
        here = Stream(folder / "stream-0", lengths, config.hidden_size)
        table = find(config.spec.global_weights, "model.embed_tokens")
        assert isinstance(table, Linear)
        for number, sequence in enumerate(calibration.sequences):
            here.set_sequence(number, weights.lookup("", table, sequence))
        for layer in range(config.num_hidden_layers):
            out = Stream(folder / f"stream-{layer + 1}", lengths, config.hidden_size)
            step = LayerAnalysis(plan, weights, layer, here, out, selections, workers, folder)

            def expert_done(expert: int, layer: int = layer) -> None:
                progress(f"layer {layer} expert {expert}", layer + (expert + 0.5) / experts, count)

            report = step.run(unrotated, expert_done)
            if not all(torch.isfinite(torch.tensor(list(unit.noise.values()))).all() for unit in report.units):
                raise CheckFailedError(f"{prepared.options.source}: layer {layer}: NaN or infinity", "check the source")
            found.layers.append(report)
            here.file.remove()
            here = out
            progress(f"noise {report.noise**0.5:.4f}", layer + 1, count)
        here.file.remove()
        if selections.file is not None:
            selections.file.close()
    return found
