"""An analysis with its proposal, as text and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glm5_ascend.errors import json_frame
from glm5_ascend.fidelity.analysis.budget import Fallback, final_types
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer
from glm5_ascend.fidelity.analysis.run import Analysis
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.report.units import format_bytes

#: Units and caches that the terminal shows.
SHOWN = 12


@dataclass
class AnalysisReport:
    """Measurements of an analysis, and the fall-backs that a budget allows.

    Attributes:
        output_bytes: size of the checkpoint with the fall-backs.
        steps: fall-backs in the order they are taken, empty without a budget.
    """

    analysis: Analysis
    output_bytes: int
    steps: Sequence[Fallback] = ()

    @property
    def units(self) -> list[Unit]:
        """All units, those with most noise first."""
        units = (unit for layer in self.analysis.layers for unit in layer.units)
        return sorted(units, key=lambda unit: -unit.noise[unit.scheme])

    @property
    def changes(self) -> list[tuple[Unit, str]]:
        """Units that change, and their new types."""
        return final_types(self.steps)

    @property
    def wide_caches(self) -> list[int]:
        """Layers whose indexer cache stays in 16 bits, because it changes more keys than the recipe's rules allow."""
        rules = self.analysis.plan.recipe.spec.fallback
        limit = math.inf if rules is None else rules.keys_lost
        return [layer.layer for layer in self.analysis.layers if layer.cache is not None and layer.cache.lost > limit]

    @property
    def noise(self) -> float:
        """Energy of the noise of all units, relative to the streams and summed over the layers."""
        return sum(layer.noise for layer in self.analysis.layers) or 1.0

    @property
    def noise_removed(self) -> float:
        """Energy that the fall-backs remove."""
        return sum(step.gain for step in self.steps)

    def lines(self) -> Iterator[str]:
        """The report for a terminal."""
        analysis, units = self.analysis, self.units
        yield (
            f"{analysis.options.source} under {analysis.plan.recipe.metadata.config_id}: "
            f"{format_bytes(analysis.plan.output_bytes)}, {analysis.calibration.tokens} calibration tokens"
        )
        yield "noise that each unit adds to its layer's residual stream (rms, relative):"
        for unit in units[:SHOWN]:
            others = ", ".join(f"{name} {unit.noise[name] ** 0.5:.5f}" for name in unit.noise if name != unit.scheme)
            yield f"  {unit.label:<60} {unit.scheme:<13} {unit.noise[unit.scheme] ** 0.5:.5f}  ({others})"
        if len(units) > SHOWN:
            yield f"  ... and {len(units) - SHOWN} more (--json)"
        caches = [(layer.layer, layer.cache) for layer in analysis.layers if layer.cache is not None]
        if caches:
            yield "INT8 indexer caches, share of the selected keys that they change:"
        for layer, cache in sorted(caches, key=lambda item: -item[1].lost)[:SHOWN]:
            note = "  stays in 16 bits" if layer in self.wide_caches else ""
            yield f"  layer {layer:<54} {1 - cache.same_keys:.2%} in {cache.readers} layers{note}"
        cold = sum(layer.expert_tokens.count(0) for layer in analysis.layers)
        if cold:
            yield f"{cold} experts saw no token and were not measured (more text: --calib, --samples)"
        if self.steps:
            share, size = self.noise_removed / self.noise, format_bytes(self.output_bytes)
            yield f"fall-backs: {share:.1%} of the noise is removed, {size} predicted"
            for unit, scheme in self.changes:
                yield f"  {unit.label:<60} {unit.scheme} -> {scheme}"

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        analysis = self.analysis
        return json_frame("analyze") | {
            "source": str(analysis.options.source), "recipe": analysis.plan.recipe.metadata.config_id,
            "recipe_bytes": analysis.plan.output_bytes, "predicted_bytes": self.output_bytes,
            "calibration_tokens": analysis.calibration.tokens, "noise": self.noise,
            "noise_removed": self.noise_removed, "layers": [_layer(layer) for layer in analysis.layers],
            "wide_indexer_caches": self.wide_caches,
            "fallbacks": [
                {"layer": unit.layer, "modules": unit.patterns, "from": unit.scheme, "to": scheme}
                for unit, scheme in self.changes
            ],
        }  # fmt: skip


def _layer(layer: AnalyzedLayer) -> dict[str, Any]:
    units = [
        {"label": unit.label, "type": unit.scheme, "noise": unit.noise, "bytes": unit.nbytes} for unit in layer.units
    ]
    return {
        "layer": layer.layer, "noise": layer.noise, "units": units, "expert_tokens": layer.expert_tokens,
        "indexer_cache": None if layer.cache is None else asdict(layer.cache),
    }  # fmt: skip
