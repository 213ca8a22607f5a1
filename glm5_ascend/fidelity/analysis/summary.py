"""An analysis as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from glm5_ascend.fidelity.analysis.budget import Fallback, final_types, wide_caches
from glm5_ascend.fidelity.analysis.experts import ExpertReport
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer, LinearReport
from glm5_ascend.fidelity.analysis.run import Analysis
from glm5_ascend.report.units import format_bytes

#: Units and experts shown as text.
SHOWN = 12


def lines(found: Analysis, steps: list[Fallback], predicted: int) -> Iterator[str]:
    """The report on a terminal."""
    plan = found.plan
    yield (
        f"{found.options.source} under {plan.recipe.metadata.config_id}: {format_bytes(plan.output_bytes)}, "
        f"{found.tokens} calibration tokens"
    )
    yield "noise each unit adds to its layer's residual stream (rms, relative):"
    ranked = sorted((u for layer in found.layers for u in layer.units), key=lambda u: -u.noise[u.scheme])
    for unit in ranked[:SHOWN]:
        more = ", ".join(f"{kind} {unit.noise[kind] ** 0.5:.5f}" for kind in unit.noise if kind != unit.scheme)
        yield f"  {unit.label:<60} {unit.scheme:<13} {unit.noise[unit.scheme] ** 0.5:.5f}  ({more})"
    if len(ranked) > SHOWN:
        yield f"  ... and {len(ranked) - SHOWN} more (--json, --html)"
    yield from _caches(found)
    cold = sum(not expert.tokens for layer in found.layers for expert in layer.experts)
    if cold:
        yield f"{cold} experts saw no token: nothing is known of them (more text: --calib, --samples)"
    if steps:
        removed, total = removed_noise(found, steps)
        yield f"fall-backs: {removed / total:.1%} of the noise goes, {format_bytes(predicted)} predicted"
        for unit, scheme in final_types(steps):
            yield f"  {unit.label:<60} {unit.scheme} -> {scheme}"


def _caches(found: Analysis) -> Iterator[str]:
    """Layers whose indexer cache the recipe has in INT8, those that change most keys first."""
    known = [(layer.layer, layer.cache) for layer in found.layers if layer.cache is not None]
    wide = wide_caches(found.layers, found.plan.recipe.spec.fallback)
    if known:
        yield "INT8 indexer caches, share of the chosen keys that they change:"
    for number, cache in sorted(known, key=lambda each: -each[1].lost)[:SHOWN]:
        kept = "  stays in 16 bits" if number in wide else ""
        yield f"  layer {number:<54} {1 - cache.same_keys:.2%} in {cache.readers} layers{kept}"


def removed_noise(found: Analysis, steps: list[Fallback]) -> tuple[float, float]:
    """Energy the steps remove, and all there is, relative to the streams and summed over the layers."""
    return sum(step.gain for step in steps), sum(layer.noise for layer in found.layers) or 1.0


def to_json(found: Analysis, steps: list[Fallback], predicted: int) -> dict[str, Any]:
    """The report as one object."""
    removed, total = removed_noise(found, steps)
    return {
        "schema_version": 1, "command": "analyze", "ok": True, "exit_code": 0, "source": str(found.options.source),
        "recipe": found.plan.recipe.metadata.config_id, "recipe_bytes": found.plan.output_bytes,
        "predicted_bytes": predicted, "calibration_tokens": found.tokens, "noise": total, "noise_removed": removed,
        "layers": [_layer(layer) for layer in found.layers],
        "wide_indexer_caches": wide_caches(found.layers, found.plan.recipe.spec.fallback),
        "fallbacks": [
            {"layer": unit.layer, "modules": unit.patterns, "from": unit.scheme, "to": scheme}
            for unit, scheme in final_types(steps)
        ],
    }  # fmt: skip


def _layer(layer: AnalyzedLayer) -> dict[str, Any]:
    cache = layer.cache
    return {
        "layer": layer.layer,
        "noise": layer.noise,
        "indexer_cache": None if cache is None else {"same_keys": cache.same_keys, "readers": cache.readers},
        "units": [
            {"label": unit.label, "type": unit.scheme, "noise": unit.noise, "bytes": unit.nbytes}
            for unit in layer.units
        ],
        "modules": [_linear(linear) for linear in layer.linears],
        "experts": [_expert(expert) for expert in layer.experts],
        "weight_scales": {scheme: counts.tolist() for scheme, counts in layer.scales.items()},
    }


def _linear(linear: LinearReport) -> dict[str, Any]:
    return {
        "name": linear.name, "type": linear.scheme, "tokens": linear.tokens, "output_error": linear.errors.output,
        "weight_error": linear.errors.weight, "activation_error": linear.errors.activation,
        "activations": {state: asdict(found) for state, found in linear.activations.items()},
        "weights": {state: asdict(found) for state, found in linear.weights.items()},
    }  # fmt: skip


def _expert(expert: ExpertReport) -> dict[str, Any]:
    return {
        "expert": expert.expert, "tokens": expert.tokens, "output_error": expert.output,
        "modules": {name: asdict(found) for name, found in expert.linears.items()},
        "weights": {n: {s: asdict(o) for s, o in each.items()} for n, each in expert.weights.items()},
        "activations": {n: {s: asdict(o) for s, o in each.items()} for n, each in expert.activations.items()},
    }  # fmt: skip
