"""An analysis as one HTML page, and which units stand out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from glm5_ascend.fidelity.analysis.budget import Fallback, final_types, wide_caches
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer, LinearReport
from glm5_ascend.fidelity.analysis.measure import SCALE_HIGH, SCALE_LOW, Outliers
from glm5_ascend.fidelity.analysis.outliers import STATES
from glm5_ascend.fidelity.analysis.run import Analysis
from glm5_ascend.fidelity.analysis.summary import removed_noise
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.report import charts
from glm5_ascend.report.content import Card, Chart, Page, Section, Table
from glm5_ascend.report.header import Hashed, ReportHeader, hashed_file, make_header
from glm5_ascend.report.units import format_bytes
from glm5_ascend.report.verdict import MOST_NOISE, ReportVerdict

#: Units in the chart of the noisiest ones.
WORST = 20
_NOISE = "noise, rms, relative to the stream"
_MODULES = (
    ("self_attn.indexer.", "indexer "),
    ("self_attn.", ""),
    ("mlp.shared_experts.", "shared "),
    ("mlp.", "dense "),
)


def document(found: Analysis, steps: list[Fallback], predicted: int, header: ReportHeader | None = None) -> Page:
    """The report; `header` says where it comes from, None: from this process, now."""
    units = sorted((unit for layer in found.layers for unit in layer.units), key=lambda unit: -_rms(unit))
    return Page(
        f"{Path(found.options.source).name} under {found.plan.recipe.metadata.config_id}",
        header or _header(found),
        verdict(units),
        [f"Measured on {found.tokens:,} calibration tokens; MTP layers are not looked at."],
        list(_cards(found, steps, predicted, len(units))),
        list(_sections(found, steps, units)),
    )


def _header(found: Analysis) -> ReportHeader:
    recipe = Hashed(found.plan.recipe.metadata.config_id, hashed_file(found.recipe_path).sha256)
    return make_header(str(found.options.seed), str(recipe), str(hashed_file(found.text)))


def standing_out(units: Sequence[Unit]) -> list[Unit]:
    """The fewest units that together make MOST_NOISE of the noise (energy, summed over the layers), noisiest first."""
    ranked = sorted(units, key=lambda unit: -unit.noise[unit.scheme])
    total = sum(unit.noise[unit.scheme] for unit in ranked)
    reached = list(itertools.accumulate(unit.noise[unit.scheme] for unit in ranked))
    return ranked[: 1 + sum(sum_ < MOST_NOISE.value * total for sum_ in reached)] if total > 0 else []


def verdict(units: Sequence[Unit]) -> ReportVerdict:
    """Which units stand out, noisiest first, and by which rule."""
    loud = standing_out(units)
    if not loud:
        return ReportVerdict("open", "No verdict: rounding adds no noise.", "", "")
    threshold = f"the fewest units that together make {MOST_NOISE.value:.0%} of the noise (energy)"
    if 2 * len(loud) > len(units):
        return ReportVerdict("good", f"No unit stands out: {len(loud)} of {len(units)} units make most of the noise.",
                       threshold, MOST_NOISE.reason)  # fmt: skip
    named = ", ".join(f"{unit.label} ({_rms(unit):.4f})" for unit in loud[:5])
    more = f" and {len(loud) - 5} more" if len(loud) > 5 else ""
    text = f"{len(loud)} of {len(units)} units make most of the noise: {named}{more}."
    return ReportVerdict("fair", text, threshold, MOST_NOISE.reason)


def _rms(unit: Unit) -> float:
    return math.sqrt(unit.noise[unit.scheme])


def _cards(found: Analysis, steps: list[Fallback], predicted: int, units: int) -> Iterator[Card]:
    removed, total = removed_noise(found, steps)
    yield Card("recipe_bytes", format_bytes(found.plan.output_bytes), "as the recipe has it")
    if steps:
        yield Card("predicted_bytes", format_bytes(predicted), "with the fall-backs")
        yield Card("noise_removed", f"{removed / total:.1%}", "of the noise goes", f"{len(steps)} steps")
    yield Card("units", str(units), "units that can change their type")


def _sections(found: Analysis, steps: list[Fallback], units: list[Unit]) -> Iterator[Section]:
    layers = found.layers
    rows = [(f"layer {layer.layer}", layer.noise**0.5, f"{layer.noise**0.5:.4f}") for layer in layers]
    yield Section(
        "Noise by layer",
        [charts.bars("Noise by layer", rows, _NOISE)],
        "What rounding adds to the residual stream of a layer, rms, relative to the stream.",
    )
    worst = [(_short(unit.label), _rms(unit), f"{_rms(unit):.5f}") for unit in units[:WORST]]
    yield Section("Noise by unit", [charts.bars("Noise by unit", worst, _NOISE), _table(units)],
                  f"The {len(worst)} units that add most; the table has them all.")  # fmt: skip
    if steps:
        rows_of_steps = [[u.label, u.scheme, kind] for u, kind in final_types(steps)]
        yield Section("Fall-backs", [Table(["unit", "from", "to"], rows_of_steps)])
    yield from _caches(found)
    if names := _names(layers):
        title = "Output error by module"
        grid = _grid(layers, lambda linear: linear.errors.output)
        drawn = charts.heat_map(title, list(map(_short, names)), grid, _most(grid), "layer", "relative error")
        yield Section(title, [drawn])
        yield _states(layers, "activations", lambda linear: linear.activations)
        yield _states(layers, "weights", lambda linear: linear.weights)
    yield from _scales(layers)
    yield from _experts(layers)


def _caches(found: Analysis) -> Iterator[Section]:
    """INT8 indexer caches, where the recipe has any."""
    known = [(layer.layer, layer.cache) for layer in found.layers if layer.cache is not None]
    wide = wide_caches(found.layers, found.plan.recipe.spec.fallback)
    if known:
        title = "Keys that an INT8 indexer cache changes"
        rows = [
            (
                f"layer {number}{' (16 bits)' * (number in wide)}",
                cache.lost,
                f"{1 - cache.same_keys:.2%} x {cache.readers}",
            )
            for number, cache in known
        ]
        note = (
            "Share of the chosen keys, times the layers that attend to them; 16 bits: the recipe's rule keeps it wide."
        )
        yield Section(title, [charts.bars(title, rows, "share of keys, summed over layers", percent=True)], note)


def _table(units: list[Unit]) -> Table:
    rows = [
        [unit.label, unit.scheme, f"{_rms(unit):.6f}", ", ".join(f"{kind} {noise**0.5:.6f}" for kind, noise in others)]
        for unit in units
        for others in [[(kind, noise) for kind, noise in unit.noise.items() if kind != unit.scheme]]
    ]
    return Table(["unit", "type", "noise (rms)", "noise as another type"], rows)


def _short(name: str) -> str:
    for long, short in _MODULES:
        name = name.replace(long, short)
    return name


def _names(layers: list[AnalyzedLayer]) -> list[str]:
    return list(dict.fromkeys(linear.name for layer in layers for linear in layer.linears))


def _grid(layers: list[AnalyzedLayer], of: Callable[[LinearReport], float]) -> list[list[float | None]]:
    """[modules, layers]."""
    found = {(layer.layer, linear.name): of(linear) for layer in layers for linear in layer.linears}
    return [[found.get((layer.layer, name)) for layer in layers] for name in _names(layers)]


def _most(*grids: list[list[float | None]]) -> float:
    return max((value for grid in grids for row in grid for value in row if value is not None), default=0.0)


def _states(layers: list[AnalyzedLayer], what: str, of: Callable[[LinearReport], dict[str, Outliers]]) -> Section:
    def peaks(state: str) -> list[list[float | None]]:
        return _grid(layers, lambda linear: of(linear)[state].peak)

    grids = {state: peaks(state) for state in STATES}
    most = _most(*grids.values())  # one colour means one value in all three
    rows = list(map(_short, _names(layers)))
    drawn: list[Chart] = [
        charts.heat_map(f"Outliers of {what}, {state}", rows, grid, most, "layer", "largest over rms")
        for state, grid in grids.items()
    ]
    note = "Largest |x| over rms, as in the source, rotated, and smoothed; one colour is one value in all three."
    return Section(f"Outliers of {what}", drawn, note)


def _scales(layers: list[AnalyzedLayer]) -> Iterator[Section]:
    total: dict[str, torch.Tensor] = {}
    for layer in layers:
        for scheme, counts in layer.scales.items():
            total[scheme] = total.get(scheme, torch.zeros_like(counts)) + counts
    for scheme, counts in sorted(total.items()):
        title = f"Weight scales of {scheme}"
        values = [float(count) for count in counts.tolist()]
        yield Section(title, [charts.log_histogram(title, values, SCALE_LOW, SCALE_HIGH, "scale", "rows")])


def _experts(layers: list[AnalyzedLayer]) -> Iterator[Section]:
    moe = [layer for layer in layers if layer.experts]
    rows = [f"layer {layer.layer}" for layer in moe]
    usage: list[list[float | None]] = [[float(expert.tokens) for expert in layer.experts] for layer in moe]
    if moe:
        yield Section("Expert usage", [charts.heat_map("Expert usage", rows, usage, _most(usage), "expert", "tokens")])
    wrong: list[list[float | None]] = [
        [next(iter(expert.output.values()), None) for expert in layer.experts] for layer in moe
    ]
    if _most(wrong) > 0:
        title = "Output error of the experts"
        yield Section(title, [charts.heat_map(title, rows, wrong, _most(wrong), "expert", "relative error")])
