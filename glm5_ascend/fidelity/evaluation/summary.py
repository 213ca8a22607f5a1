"""A finished evaluation as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from glm5_ascend.fidelity.evaluation.compare import LayerAgreement
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.report.verdict import FEW_WINDOWS, KL_CLOSE, KL_USABLE, ReportVerdict


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

    def verdict(self) -> ReportVerdict:
        """Whether mean KL is small, judged by the upper end of its interval."""
        warnings = tuple(
            f"{count} {what}: too few for a 95 % interval (at least {FEW_WINDOWS.value:.0f}): {FEW_WINDOWS.reason}"
            for what, count in (("windows", self.windows if self.rows else 0), ("prompts", self.prompts))
            if 0 < count < FEW_WINDOWS.value
        )
        kl = next((row for row in self.rows if row.name == "kl_mean"), None)
        if kl is None:
            return ReportVerdict("open", "No verdict: KL was not measured.", "", "", warnings)
        end, where = (kl.interval[1], "upper end of its 95 % interval") if kl.interval else (kl.value, "one window")
        text = f"mean KL {kl.value:.6f} nats ({where}: {end:.6f})"
        close, usable = f"{KL_CLOSE.value:g}", f"{KL_USABLE.value:g}"
        if kl.name == "kl_mean" and self.kl_is_bound:
            warnings += ("KL from a server's most probable tokens is a lower bound: the true one may be larger.",)
        if end <= KL_CLOSE.value:
            return ReportVerdict(
                "good", f"Close to the reference: {text}.", f"at most {close} nats", KL_CLOSE.reason, warnings
            )
        if end <= KL_USABLE.value:
            return ReportVerdict(
                "fair", f"Usable, test it on your tasks: {text}.", f"above {close}, at most {usable} nats",
                KL_USABLE.reason, warnings,
            )  # fmt: skip
        return ReportVerdict(
            "poor", f"Far from the reference: {text}.", f"above {usable} nats", KL_USABLE.reason, warnings
        )

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
        judged = self.verdict()
        yield f"{judged.text}{f' (threshold: {judged.threshold})' if judged.threshold else ''}"
        if self.windows == 1 or self.prompts == 1:
            yield "note: no intervals from a single window or prompt"
            return
        for warning in judged.warnings:
            yield "note: " + warning.partition(" (")[0]  # the reasons stand in the HTML report

    def to_dict(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "schema_version": 1, "command": "eval", "ok": True, "exit_code": 0, "this": self.this,
            "reference": self.reference, "tokens": self.tokens, "windows": self.windows, "window": self.window,
            "prompts": self.prompts,
        }  # fmt: skip
        rows = [*self.rows, *self.generated]
        value |= {row.name: row.value for row in rows}
        value["intervals"] = {row.name: row.interval for row in rows if row.interval is not None}
        value["verdict"] = asdict(self.verdict())
        value["kl_is_lower_bound"] = self.kl_is_bound
        value["layers"] = [
            {
                "layer": layer.layer,
                "expert_agreement": mean_share(layer.experts),
                "indexer_overlap": mean_share(layer.indexer),
            }
            for layer in self.layers
        ]
        return value


def mean_share(share: torch.Tensor | None) -> float | None:
    """Mean over windows of a share [windows]; None where there is nothing to compare."""
    return None if share is None else float(share.mean())


def value_text(row: Metric, value: float) -> str:
    """`value` as figures of the kind of `row` are written."""
    signed = row.name.endswith(("change", "delta", "inflation"))
    if row.percent:
        return f"{value:+.2%}" if signed else f"{value:.2%}"
    if row.name.startswith("length"):
        return f"{value:.1f}"
    return f"{value:+.6f}" if signed else f"{value:.6f}"


def span(row: Metric) -> str:
    """The 95 % interval, or nothing."""
    return "" if row.interval is None else f"[{value_text(row, row.interval[0])}, {value_text(row, row.interval[1])}]"


def _line(row: Metric) -> str:
    return f"  {row.label:<52} {value_text(row, row.value):>12}  {span(row)}".rstrip()
