"""From per-position values to the figures that are reported.

Flips as in "Accuracy is Not All You Need" (Dutta et al., arXiv 2407.09141): answers that change from right to wrong
or from wrong to right. Teacher-forced, an answer is the most probable next token, and right is the true one. Top-1
agreement also misses where one wrong token gives way to another: 1 - top-1 agreement is never below the flip rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from glm5_ascend.errors import EvaluationError
from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, LayerAgreement
from glm5_ascend.fidelity.evaluation.drafts import DraftComparison
from glm5_ascend.fidelity.evaluation.intervals import Interval, interval, mean_interval

#: Groups `--metrics` knows.
GROUPS = ("kl", "top1", "flips", "nll", "routing", "indexer", "mtp")


@dataclass(frozen=True)
class Metric:
    """One figure and its 95 % interval; `percent`: show it as such."""

    name: str
    label: str
    value: float
    interval: Interval = None
    percent: bool = False
    group: str = ""


def chosen_groups(text: str | None) -> tuple[str, ...]:
    """`--metrics kl,top1` -> its groups; all for None.

    Raises:
        EvaluationError: an unknown one.
    """
    if text is None:
        return GROUPS
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in GROUPS:
            raise EvaluationError(f"--metrics: {name!r} is not known", f"known: {','.join(GROUPS)}")
    return names


def p99(values: torch.Tensor) -> torch.Tensor:
    """The smallest value that 99 % of all do not exceed (nearest rank)."""
    return values.kthvalue(-(-99 * len(values) // 100))[0]  # torch.quantile refuses more than 2^24 values


def metrics(found: FidelityComparison) -> list[Metric]:
    """All figures of a comparison."""
    kl, a, b = found.kl, found.nll_reference, found.nll_this
    flips = (found.right_reference != found.right_this).double()
    top1, delta = found.same_top1.double(), b - a
    bound = " (lower bound)" if found.kl_is_bound else ""
    relative = mean_interval(delta.mean(1), a.mean(1))
    rows = [
        Metric("kl_mean", f"KL to the reference, mean{bound}", float(kl.mean()), mean_interval(kl.mean(1)), group="kl"),
        Metric("kl_p99", f"KL, 99th percentile{bound}", float(p99(kl.flatten())), interval(kl, p99), group="kl"),
        Metric("kl_max", f"KL, largest{bound}", float(kl.max()), group="kl"),
        Metric("top1_agreement", "same top-1", float(top1.mean()), mean_interval(top1.mean(1)), True, "top1"),
        Metric("flip_rate", "flips", float(flips.mean()), mean_interval(flips.mean(1)), True, "flips"),
        Metric("nll_source", "NLL of the reference", float(a.mean()), mean_interval(a.mean(1)), group="nll"),
        Metric("nll_quantized", "NLL of this", float(b.mean()), mean_interval(b.mean(1)), group="nll"),
        Metric("nll_delta", "change of NLL", float(delta.mean()), mean_interval(delta.mean(1)), group="nll"),
        Metric("nll_change", "relative change of NLL", float(delta.mean() / a.mean()), relative, True, "nll"),
    ]
    rows += [row for row in (_routing(found.layers), _indexer(found.layers)) if row is not None]
    return rows + (_drafts(found.drafts) if found.drafts is not None else [])


def _drafts(found: DraftComparison) -> list[Metric]:
    """Shares of accepted drafts, and what a server with one draft a step loses: tokens per step are 1 + the share."""
    shares = (
        ("draft_source", "drafts accepted, reference (greedy)", found.greedy_reference),
        ("draft_quantized", "drafts accepted, this (greedy)", found.greedy_this),
        ("draft_sampled_source", "drafts accepted, reference (temperature 1)", found.sampled_reference),
        ("draft_sampled_quantized", "drafts accepted, this (temperature 1)", found.sampled_this),
    )
    rows = [
        Metric(name, label, float(each.double().mean()), mean_interval(each.double().mean(1)), True, "mtp")
        for name, label, each in shares
    ]
    a, b = found.greedy_reference.double().mean(1), found.greedy_this.double().mean(1)
    change, interval_ = float((b - a).mean() / (1 + a.mean())), mean_interval(b - a, 1 + a)
    return [*rows, Metric("draft_step_change", "tokens per step with one draft", change, interval_, True, "mtp")]


def _routing(layers: list[LayerAgreement]) -> Metric | None:
    return _over_layers(layers, lambda layer: layer.experts, "expert_agreement", "same routed experts", "routing")


def _indexer(layers: list[LayerAgreement]) -> Metric | None:
    return _over_layers(layers, lambda layer: layer.indexer, "indexer_overlap", "same keys of the indexer", "indexer")


def _over_layers(
    layers: list[LayerAgreement], of: Callable[[LayerAgreement], torch.Tensor | None], name: str, label: str, group: str
) -> Metric | None:
    shares = [share for layer in layers if (share := of(layer)) is not None]
    if not shares:
        return None
    windows = torch.stack(shares).mean(0)
    return Metric(name, label, float(windows.mean()), mean_interval(windows), True, group)
