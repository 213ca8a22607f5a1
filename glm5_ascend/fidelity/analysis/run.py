"""All main layers of a source under a recipe, on calibration text, layer by layer and expert by expert.

Measured: for every unit the energy that its rounding alone adds to the residual stream of its layer. Assumed: units add
up, noise of the same relative energy costs the same in every layer, and FLOAT costs nothing (bf16 rounding of rotated
weights is left out). MTP layers are not analyzed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.checkpoint.workers import Workers, cores
from glm5_ascend.errors import CheckFailedError, RecipeError
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer, LayerAnalysis
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.model.memory import FP32, linear_values
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.calibration.dataset import CalibrationSet, calibration_text, load_calibration
from glm5_ascend.quantize.calibration.forward import LayerStreams, open_selections, stream_name
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.estimate import memory
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.progress import Progress, silent, with_memory
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.run.residual_streams import embedded
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.selector import without_effect


@dataclass
class Analysis:
    """A checked job and its measurements.

    Attributes:
        recipe_path, plan: the recipe.
        layers: empty until `analyze` has run.
    """

    options: AnalyzeOptions
    recipe_path: Path
    plan: QuantizationPlan
    calibration: CalibrationSet
    notes: list[str] = field(default_factory=list)
    layers: list[AnalyzedLayer] = field(default_factory=list)


def prepare(options: AnalyzeOptions) -> Analysis:
    """Check source, recipe and text; nothing is computed.

    Raises:
        Glm5Error: the first thing that would make the analysis fail.
    """
    path = find_recipe(options.recipe)
    recipe, source = load_recipe(path), open_source(Path(options.source))
    plan = QuantizationPlan(source, recipe)
    text, note = calibration_text(recipe, options.calib)
    notes = [note] * bool(note) + [f"recipe: {sentence}" for sentence in without_effect(recipe, source.config)]
    calibration = load_calibration(
        text, Path(options.source), source.config.vocab_size, options.samples, options.seq_len
    )
    if len(calibration.sequences[0]) <= (topk := source.config.index_topk):
        problem = f"sequences of at most {options.seq_len} tokens cannot measure the indexer, which keeps {topk} keys"
        if recipe.spec.fallback is not None and recipe.cache_steps:
            raise RecipeError(f"{problem}: the recipe's rule keys_lost cannot be judged", f"give --seq-len {2 * topk}")
        notes.append(f"{problem} (--seq-len {2 * topk})")
    return Analysis(options, path, plan, calibration, notes)


@torch.no_grad()
def analyze(analysis: Analysis, progress: Progress = silent, threads: int | None = None) -> Analysis:
    """Measure all main layers; activations lie in a temporary folder (TMPDIR) meanwhile.

    Args:
        threads: cores to use, None for all; any number gives the same bits.
    Raises:
        CheckFailedError: NaN or infinity in the residual stream.
    """
    plan, config = analysis.plan, analysis.plan.config
    rotations = Rotations(config, QuantizeOptions.seed) if plan.recipe.rotates else None
    weights = FloatWeights(plan.source, rotations, torch.device("cpu"))
    lengths = tuple(len(sequence) for sequence in analysis.calibration.sequences)
    count = config.num_hidden_layers
    threads = threads or cores()
    probes = FP32 * max(linear_values(config, layer) for layer in range(count))
    progress(with_memory("embedding", memory.peak_bytes(plan, max(lengths), threads) + probes), 0, count)
    with tempfile.TemporaryDirectory(prefix="glm5-analyze-") as name, Workers(threads) as workers:
        folder = Path(name)
        selections = open_selections(config, folder, lengths)
        stream = embedded(weights, folder, analysis.calibration.sequences, workers)
        for layer in range(count):
            out = Stream(folder / stream_name(layer + 1), lengths, config.stream_width)

            def advance(share: float, layer: int = layer) -> None:
                progress(f"layer {layer}", layer + share, count)

            around = LayerStreams(stream, out, selections)
            report = LayerAnalysis(plan, weights, layer, around, workers, advance).run()
            if not all(torch.isfinite(torch.tensor(list(unit.noise.values()))).all() for unit in report.units):
                raise CheckFailedError(f"{analysis.options.source}: layer {layer}: NaN or infinity", "check the source")
            analysis.layers.append(report)
            stream.remove()
            stream = out
            progress(f"noise {report.noise**0.5:.4f}", layer + 1, count)
    return analysis
