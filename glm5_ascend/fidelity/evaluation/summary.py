"""A finished evaluation as text, JSON and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from glm5_ascend.fidelity.evaluation.compare import LayerAgreement
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.report import page, plots

_NOTE = (
    "Teacher-forced. Intervals: 95 %, paired bootstrap over windows (prompts for generation). Flips: positions where "
    "just one of the two models has the true token as its most probable one."
)


@dataclass
class Summary:
    """What is reported: the figures, the windows they come from, and the agreement of every layer."""

    this: str
    reference: str
    rows: list[Metric] = field(default_factory=list)
    generated: list[Metric] = field(default_factory=list)
    layers: list[LayerAgreement] = field(default_factory=list)
    window: int = 0
    windows: int = 0
    prompts: int = 0
    kl_is_bound: bool = False
    per_window: torch.Tensor | None = None  # mean KL [windows]

    @property
    def tokens(self) -> int:
        """Positions with a prediction."""
        return self.windows * max(0, self.window - 1)

    def lines(self) -> Iterator[str]:
        yield f"{self.this} against {self.reference}"
        if self.rows:
            yield f"{self.tokens} positions in {self.windows} windows of {self.window} tokens"
        for row in self.rows:
            yield _line(row)
        if self.generated:
            yield f"{self.prompts} prompts"
        for row in self.generated:
            yield _line(row)
        if self.windows == 1 or self.prompts == 1:
            yield "note: no intervals from a single window or prompt"

    def to_dict(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "schema_version": 1, "command": "eval", "ok": True, "exit_code": 0, "this": self.this,
            "reference": self.reference, "tokens": self.tokens, "windows": self.windows, "window": self.window,
            "prompts": self.prompts,
        }  # fmt: skip
        rows = [*self.rows, *self.generated]
        value |= {row.name: row.value for row in rows}
        value["intervals"] = {row.name: row.interval for row in rows if row.interval is not None}
        value["kl_is_lower_bound"] = self.kl_is_bound
        value["layers"] = [
            {"layer": layer.layer, "expert_agreement": _mean(layer.experts), "indexer_overlap": _mean(layer.indexer)}
            for layer in self.layers
        ]
        return value

    def html(self) -> str:
        return page.page(f"{self.this} against {self.reference}", self._body())

    def _body(self) -> Iterator[str]:
        if self.rows:
            text = f"{self.tokens:,} positions in {self.windows} windows of {self.window} tokens. {_NOTE}"
            yield f'<p class="soft">{html.escape(text)}</p>'
        rows = [*self.rows, *self.generated]
        yield '<div class="cards">'
        for row in rows:
            if row.name in ("kl_mean", "kl_p99", "top1_agreement", "nll_change", "length_inflation", "score_change"):
                yield page.card(row.name, _value(row, row.value), row.label, _span(row))
        yield "</div>"
        if rows:
            yield "<h2>Figures and their intervals</h2>"
            yield plots.intervals("figures and their intervals", [_plotted(row) for row in rows])
        if self.per_window is not None:
            yield "<h2>Mean KL of each window</h2>"
            yield plots.columns("mean KL by window", self.per_window.tolist(), "window")
        for title, values in (
            ("Same routed experts by layer", [(layer.layer, _mean(layer.experts)) for layer in self.layers]),
            ("Same keys of the indexer by layer", [(layer.layer, _mean(layer.indexer)) for layer in self.layers]),
        ):
            known = [(f"layer {number}", share) for number, share in values if share is not None]
            if known:
                yield f"<h2>{title}</h2>"
                yield plots.bars(title, [(label, 1 - share, f"{share:.2%}") for label, share in known])
                yield '<p class="soft">The bar is what differs.</p>'
        yield "<h2>All figures</h2>"
        yield from page.table(
            ["figure", "value", "95 % interval"], [(row.label, _value(row, row.value), _span(row)) for row in rows]
        )


def _mean(share: torch.Tensor | None) -> float | None:
    return None if share is None else float(share.mean())


def _value(row: Metric, value: float) -> str:
    signed = row.name.endswith(("change", "delta", "inflation"))
    if row.percent:
        return f"{value:+.2%}" if signed else f"{value:.2%}"
    if row.name.startswith("length"):
        return f"{value:.1f}"
    return f"{value:+.6f}" if signed else f"{value:.6f}"


def _span(row: Metric) -> str:
    return "" if row.interval is None else f"[{_value(row, row.interval[0])}, {_value(row, row.interval[1])}]"


def _plotted(row: Metric) -> plots.Row:
    """On an axis from zero, to 100 % for what is nearly all, and across zero for a change of either sign."""
    low, high = row.interval or (row.value, row.value)
    if row.percent and row.value > 0.5:
        ends = (math.floor(20 * low) / 20, 1.0)
    elif low < 0:
        ends = (1.25 * min(low, -high), 1.25 * max(high, -low))
    else:
        ends = (0.0, 1.25 * high or 1.0)
    return plots.Row(
        row.label, row.value, row.interval, _value(row, row.value), ends, (_value(row, ends[0]), _value(row, ends[1]))
    )


def _line(row: Metric) -> str:
    return f"  {row.label:<52} {_value(row, row.value):>12}  {_span(row)}".rstrip()
