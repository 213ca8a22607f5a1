"""An analysis as one HTML page, and its verdict: the units that stand out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer, LinearReport
from glm5_ascend.fidelity.analysis.measure import Outliers
from glm5_ascend.fidelity.analysis.outliers import STATES
from glm5_ascend.fidelity.analysis.report import AnalysisReport
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.report import charts
from glm5_ascend.report.content import Card, Page, Section, Table
from glm5_ascend.report.header import Hashed, ReportHeader, hashed_file, make_header
from glm5_ascend.report.units import format_bytes
from glm5_ascend.report.verdict import MOST_NOISE, ReportVerdict

#: Units in the chart of the noisiest ones.
WORST = 20
_NOISE = "noise, rms, relative to the stream"
_SHORT_NAMES = {"self_attn.indexer.": "indexer ", "self_attn.": "", "mlp.shared_experts.": "shared ", "mlp.": "dense "}
#: [rows, columns] of a heat map; None is left empty.
Grid = list[list[float | None]]


def document(report: AnalysisReport) -> Page:
    """The page of a report."""
    analysis, units = report.analysis, report.units
    tokens = analysis.calibration.tokens
    return Page(
        f"{Path(analysis.options.source).name} under {analysis.plan.recipe.metadata.config_id}",
        _header(report),
        verdict(units),
        [f"Measured on {tokens:,} calibration tokens; MTP layers are not analyzed."],
        list(_cards(report)),
        list(_sections(report, units)),
    )


def _header(report: AnalysisReport) -> ReportHeader:
    analysis = report.analysis
    recipe = Hashed(analysis.plan.recipe.metadata.config_id, hashed_file(analysis.recipe_path).sha256)
    return make_header(str(analysis.options.seed), str(recipe), str(hashed_file(analysis.text)))


def units_that_stand_out(units: Sequence[Unit]) -> list[Unit]:
    """The fewest units that together make MOST_NOISE of the noise (energy, summed over layers), noisiest first."""
    ranked = sorted(units, key=lambda unit: -unit.noise[unit.scheme])
    cumulative = list(itertools.accumulate(unit.noise[unit.scheme] for unit in ranked))
    if not cumulative or cumulative[-1] <= 0:
        return []
    return ranked[: 1 + sum(noise < MOST_NOISE.value * cumulative[-1] for noise in cumulative)]


def verdict(units: Sequence[Unit]) -> ReportVerdict:
    """The units that stand out, noisiest first, and the rule."""
    loud = units_that_stand_out(units)
    if not loud:
        return ReportVerdict("open", "No verdict: rounding adds no noise.", "", "")
    threshold = f"the fewest units that together make {MOST_NOISE.value:.0%} of the noise (energy)"
    text = f"{len(loud)} of {len(units)} units make most of the noise"
    if 2 * len(loud) > len(units):
        return ReportVerdict("good", f"No unit stands out: {text}.", threshold, MOST_NOISE.reason)
    names = ", ".join(f"{unit.label} ({_rms(unit):.4f})" for unit in loud[:5])
    more = f" and {len(loud) - 5} more" if len(loud) > 5 else ""
    return ReportVerdict("fair", f"{text}: {names}{more}.", threshold, MOST_NOISE.reason)


def _rms(unit: Unit) -> float:
    return math.sqrt(unit.noise[unit.scheme])


def _cards(report: AnalysisReport) -> Iterator[Card]:
    yield Card("recipe_bytes", format_bytes(report.analysis.plan.output_bytes), "with the recipe")
    if report.steps:
        share = report.noise_removed / report.noise
        yield Card("predicted_bytes", format_bytes(report.output_bytes), "with the fall-backs")
        yield Card("noise_removed", f"{share:.1%}", "of the noise is removed", f"{len(report.steps)} steps")
    yield Card("units", str(len(report.units)), "units that can change their type")


def _sections(report: AnalysisReport, units: list[Unit]) -> Iterator[Section]:
    layers = report.analysis.layers
    rows = [(f"layer {layer.layer}", layer.noise**0.5, f"{layer.noise**0.5:.4f}") for layer in layers]
    note = "Noise that rounding adds to the residual stream of a layer, rms, relative to the stream."
    yield Section("Noise by layer", [charts.bars("Noise by layer", rows, _NOISE)], note)
    worst = [(_short(unit.label), _rms(unit), f"{_rms(unit):.5f}") for unit in units[:WORST]]
    note = f"The {len(worst)} noisiest units; the table has all."
    yield Section("Noise by unit", [charts.bars("Noise by unit", worst, _NOISE), _unit_table(units)], note)
    if report.steps:
        changes = [[unit.label, unit.scheme, scheme] for unit, scheme in report.changes]
        yield Section("Fall-backs", [Table(["unit", "from", "to"], changes)])
    yield from _caches(report)
    if names := _linear_names(layers):
        title = "Output error by module"
        grid = _grid(layers, lambda linear: linear.errors.output)
        chart = charts.heat_map(title, list(map(_short, names)), grid, _max(grid), "layer", "relative error")
        yield Section(title, [chart])
        yield _outliers(layers, "activations", lambda linear: linear.activations)
        yield _outliers(layers, "weights", lambda linear: linear.weights)
    yield from _experts(layers)


def _caches(report: AnalysisReport) -> Iterator[Section]:
    caches = [(layer.layer, layer.cache) for layer in report.analysis.layers if layer.cache is not None]
    if caches:
        title = "Keys that an INT8 indexer cache changes"
        wide = report.wide_caches
        rows = [
            (
                f"layer {number}{' (16 bits)' * (number in wide)}",
                cache.lost,
                f"{1 - cache.same_keys:.2%} x {cache.readers}",
            )
            for number, cache in caches
        ]
        note = "Share of the selected keys, times the layers that attend to them. 16 bits: by the recipe's rule."
        yield Section(title, [charts.bars(title, rows, "share of keys, summed over layers", percent=True)], note)


def _unit_table(units: list[Unit]) -> Table:
    rows = []
    for unit in units:
        others = (f"{scheme} {noise**0.5:.6f}" for scheme, noise in unit.noise.items() if scheme != unit.scheme)
        rows.append([unit.label, unit.scheme, f"{_rms(unit):.6f}", ", ".join(others)])
    return Table(["unit", "type", "noise (rms)", "noise as another type"], rows)


def _short(name: str) -> str:
    for long, short in _SHORT_NAMES.items():
        name = name.replace(long, short)
    return name


def _linear_names(layers: list[AnalyzedLayer]) -> list[str]:
    return list(dict.fromkeys(linear.name for layer in layers for linear in layer.linears))


def _grid(layers: list[AnalyzedLayer], value: Callable[[LinearReport], float]) -> Grid:
    """Values of all linears, [modules, layers]."""
    values = {(layer.layer, linear.name): value(linear) for layer in layers for linear in layer.linears}
    return [[values.get((layer.layer, name)) for layer in layers] for name in _linear_names(layers)]


def _max(*grids: Grid) -> float:
    return max((value for grid in grids for row in grid for value in row if value is not None), default=0.0)


def _outliers(
    layers: list[AnalyzedLayer], noun: str, outliers: Callable[[LinearReport], dict[str, Outliers]]
) -> Section:
    def peaks(state: str) -> Grid:
        return _grid(layers, lambda linear: outliers(linear)[state].peak)

    grids = {state: peaks(state) for state in STATES}
    top = _max(*grids.values())  # one colour scale for all three
    rows = list(map(_short, _linear_names(layers)))
    blocks = [
        charts.heat_map(f"Outliers of {noun}, {state}", rows, grid, top, "layer", "largest over rms")
        for state, grid in grids.items()
    ]
    note = "Largest |x| over rms, as in the source, rotated, and smoothed; all three have the same colour scale."
    return Section(f"Outliers of {noun}", blocks, note)


def _experts(layers: list[AnalyzedLayer]) -> Iterator[Section]:
    moe = [layer for layer in layers if layer.experts]
    rows = [f"layer {layer.layer}" for layer in moe]
    tokens: Grid = [[float(expert.tokens) for expert in layer.experts] for layer in moe]
    errors: Grid = [[next(iter(expert.output.values()), None) for expert in layer.experts] for layer in moe]
    for title, grid, name in (
        ("Expert usage", tokens, "tokens"),
        ("Output error of the experts", errors, "relative error"),
    ):
        if _max(grid) > 0:
            yield Section(title, [charts.heat_map(title, rows, grid, _max(grid), "expert", name)])
