"""An analysis as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

import torch

from glm5_ascend.fidelity.analysis.budget import Fallback, final_types
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer, LinearReport
from glm5_ascend.fidelity.analysis.measure import SCALE_HIGH, SCALE_LOW, Outliers
from glm5_ascend.fidelity.analysis.outliers import STATES
from glm5_ascend.fidelity.analysis.run import Analysis
from glm5_ascend.fidelity.analysis.summary import removed_noise
from glm5_ascend.report import page, plots
from glm5_ascend.report.units import format_bytes

#: Units in the chart of the worst ones.
WORST = 20


def document(found: Analysis, steps: list[Fallback], predicted: int) -> str:
    """The whole report."""
    title = f"{found.options.source.name} under {found.plan.recipe.metadata.config_id}"
    return page.page(title, _body(found, steps, predicted))


def _body(found: Analysis, steps: list[Fallback], predicted: int) -> Iterator[str]:
    yield f'<p class="soft">Measured on {found.tokens:,} calibration tokens; MTP layers are not looked at.</p>'
    removed, total = removed_noise(found, steps)
    units = [unit for layer in found.layers for unit in layer.units]
    yield '<div class="cards">'
    yield page.card("recipe_bytes", format_bytes(found.plan.output_bytes), "as the recipe has it")
    if steps:
        yield page.card("predicted_bytes", format_bytes(predicted), "with the fall-backs")
        yield page.card("noise_removed", f"{removed / total:.1%}", "of the noise goes", f"{len(steps)} steps")
    yield page.card("units", str(len(units)), "units that can change their type")
    yield "</div><h2>Noise by layer</h2>"
    yield '<p class="soft">What rounding adds to the residual stream of a layer, rms, relative to the stream.</p>'
    rows = [(f"layer {layer.layer}", layer.noise**0.5, f"{layer.noise**0.5:.4f}") for layer in found.layers]
    yield plots.bars("noise by layer", rows)
    yield "<h2>The loudest units</h2>"
    worst = sorted(units, key=lambda unit: -unit.noise[unit.scheme])[:WORST]
    noise = [(unit.label, unit.noise[unit.scheme] ** 0.5) for unit in worst]
    yield plots.bars("noise by unit", [(label, value, f"{value:.4f}") for label, value in noise])
    yield from _heat(found.layers, "Output error by module", lambda linear: linear.errors.output, "relative error")
    yield "<h2>Outliers of activations</h2>"
    yield '<p class="soft">Largest |x| over rms of the inputs, as in the source, rotated, and smoothed.</p>'
    yield from _states(found.layers, "activations", lambda linear: linear.activations)
    yield "<h2>Outliers of weights</h2>"
    yield from _states(found.layers, "weights", lambda linear: linear.weights)
    yield from _scales(found.layers)
    yield from _experts(found.layers)
    if steps:
        yield "<h2>Fall-backs</h2>"
        yield from page.table(["unit", "from", "to"], [[u.label, u.scheme, kind] for u, kind in final_types(steps)])


def _short(names: list[str]) -> list[str]:
    places = (
        ("self_attn.indexer.", "indexer "),
        ("self_attn.", ""),
        ("mlp.shared_experts.", "shared "),
        ("mlp.", "dense "),
    )
    for long, short in places:
        names = [name.replace(long, short) for name in names]
    return names


def _names(layers: list[AnalyzedLayer]) -> list[str]:
    return list(dict.fromkeys(linear.name for layer in layers for linear in layer.linears))


def _grid(layers: list[AnalyzedLayer], of: Callable[[LinearReport], float]) -> list[list[float | None]]:
    """[modules, layers]."""
    found = {(layer.layer, linear.name): of(linear) for layer in layers for linear in layer.linears}
    return [[found.get((layer.layer, name)) for layer in layers] for name in _names(layers)]


def _most(*grids: list[list[float | None]]) -> float:
    return max((value for grid in grids for row in grid for value in row if value is not None), default=0.0)


def _heat(layers: list[AnalyzedLayer], title: str, of: Callable[[LinearReport], float], unit: str) -> Iterator[str]:
    grid = _grid(layers, of)
    yield f"<h2>{escape(title)}</h2>"
    yield plots.heat_map(title, _short(_names(layers)), grid, _most(grid), f"layer; {unit}")


def _states(layers: list[AnalyzedLayer], what: str, of: Callable[[LinearReport], dict[str, Outliers]]) -> Iterator[str]:
    def peaks(state: str) -> list[list[float | None]]:
        return _grid(layers, lambda linear: of(linear)[state].peak)

    grids = {state: peaks(state) for state in STATES}
    most = _most(*grids.values())  # one colour means one value in all three
    for state, grid in grids.items():
        yield f"<h3>{state}</h3>"
        yield plots.heat_map(f"outliers of {what}, {state}", _short(_names(layers)), grid, most, "layer; max/rms")


def _scales(layers: list[AnalyzedLayer]) -> Iterator[str]:
    total: dict[str, torch.Tensor] = {}
    for layer in layers:
        for scheme, counts in layer.scales.items():
            total[scheme] = total.get(scheme, torch.zeros_like(counts)) + counts
    for scheme, counts in sorted(total.items()):
        yield f"<h2>Weight scales of {scheme}</h2>"
        ends = (f"1e{SCALE_LOW:.0f}", f"1e{SCALE_HIGH:.0f}")
        yield plots.columns(f"weight scales of {scheme}", [float(n) for n in counts.tolist()], "scale, rows", ends)


def _experts(layers: list[AnalyzedLayer]) -> Iterator[str]:
    moe = [layer for layer in layers if layer.experts]
    if not moe:
        return
    rows = [f"layer {layer.layer}" for layer in moe]
    usage: list[list[float | None]] = [[float(expert.tokens) for expert in layer.experts] for layer in moe]
    yield "<h2>Expert usage</h2>"
    yield plots.heat_map("expert usage", rows, usage, _most(usage), "expert; tokens")
    wrong: list[list[float | None]] = [
        [next(iter(expert.output.values()), None) for expert in layer.experts] for layer in moe
    ]
    if _most(wrong) > 0:
        yield "<h2>Output error of the experts</h2>"
        yield plots.heat_map("output error of the experts", rows, wrong, _most(wrong), "expert; relative error")
