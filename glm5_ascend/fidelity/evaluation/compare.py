"""Two checkpoints side by side, layer by layer, on the same tokens (teacher-forced).

Memory: the residual streams of both (4 bytes x tokens x hidden each) and one copy more, the indexer's choices of both
(1 byte x length^2 per window each), and the largest of: one layer's attention, one dense MLP, one routed expert, one
block of the vocabulary, as fp32. Never a whole layer or head, nor the logits of more than 1024 tokens and 4096 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from glm5_ascend.errors import CheckFailedError, EvaluationError
from glm5_ascend.fidelity.evaluation.drafts import DraftComparison, accepted, drafted, wanted_of
from glm5_ascend.fidelity.evaluation.head import Softmax, divergence, softmax_of
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.fidelity.evaluation.walk import Walk
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.layers import count_common
from glm5_ascend.quantize.progress import Progress, silent


@dataclass
class LayerAgreement:
    """Per window, fp32 [windows]: share of equal choices; None where the layer has none to compare.

    Attributes:
        experts: of a token's routed experts, how many both models chose.
        indexer: of the keys a query may keep, how many both kept; queries with more than index_topk keys only.
    """

    layer: int
    experts: torch.Tensor | None = None
    indexer: torch.Tensor | None = None

    def of(self, windows: torch.Tensor) -> LayerAgreement:
        """The same of some windows."""
        experts, indexer = (None if share is None else share[windows] for share in (self.experts, self.indexer))
        return LayerAgreement(self.layer, experts, indexer)


#: Called with the reference's and this model's walk behind every layer.
Observer = Callable[[int, tuple[Walk, Walk]], None]


@dataclass(frozen=True)
class Extras:
    """What is looked at besides. drafts: those of the MTP layer, where both models have one."""

    drafts: bool = False
    observe: Observer = lambda layer, walks: None


NOTHING = Extras()


@dataclass
class FidelityComparison:
    """Per predicted position, [windows, window - 1]; nats.

    Attributes:
        kl: fp64, KL(reference || this); with a server a lower bound.
        nll_reference, nll_this: fp64, of the true next token.
        same_top1, right_reference, right_this: bool; "right" is: the true next token has the largest probability.
    """

    kl: torch.Tensor
    nll_reference: torch.Tensor
    nll_this: torch.Tensor
    same_top1: torch.Tensor
    right_reference: torch.Tensor
    right_this: torch.Tensor
    layers: list[LayerAgreement] = field(default_factory=list)
    kl_is_bound: bool = False
    drafts: DraftComparison | None = None

    def at(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> FidelityComparison:
        """The same of some windows or positions: `pick` takes and gives [windows, positions]."""
        return replace(
            self,
            kl=pick(self.kl), nll_reference=pick(self.nll_reference), nll_this=pick(self.nll_this),
            same_top1=pick(self.same_top1), right_reference=pick(self.right_reference),
            right_this=pick(self.right_this),
        )  # fmt: skip

    def of(self, windows: torch.Tensor) -> FidelityComparison:
        """The same of some windows, int64 [n]."""
        drafts = None if self.drafts is None else self.drafts.of(windows)
        layers = [layer.of(windows) for layer in self.layers]
        return replace(self.at(lambda values: values[windows]), layers=layers, drafts=drafts)


#: What must agree for two checkpoints to be one model in two precisions.
_SAME = (
    "vocab_size", "num_hidden_layers", "hidden_size", "n_routed_experts", "num_experts_per_tok", "index_topk",
    "num_attention_heads", "mlp_layer_types",
)  # fmt: skip


def check_comparable(reference: ModelConfig, this: ModelConfig) -> None:
    """Raise `EvaluationError` where two config.json describe different models."""
    for key in _SAME:
        a, b = getattr(reference, key), getattr(this, key)
        if a != b:
            raise EvaluationError(
                f"{this.path}: {key} is {b}, {reference.path} has {a}",
                "give a checkpoint and the source it was made of",
            )


@torch.no_grad()
def compare(
    this: Path | StoredModel,
    against: Path,
    windows: list[torch.Tensor],
    progress: Progress = silent,
    extras: Extras = NOTHING,
) -> FidelityComparison:
    """`this` against the reference `against` on int64 windows, all of one length.

    Raises:
        EvaluationError: two different models. CheckFailedError: NaN or infinity, and the layer it came up in.
    """
    reference, this = StoredModel(against), StoredModel(this) if isinstance(this, Path) else this
    check_comparable(reference.config, this.config)
    count, experts = reference.config.num_hidden_layers, reference.config.n_routed_experts
    walks = Walk(reference, windows), Walk(this, windows)
    layers = []
    progress("embedding", 0, count)
    for layer in range(count):
        for half, (walk, path) in enumerate(zip(walks, (against, this.directory), strict=True)):
            _step(walk, layer, path, _expert_progress(progress, layer, count, half * experts, 2 * experts))
        agreement = LayerAgreement(layer, _same_experts(walks), _same_keys(reference.config, layer, walks))
        layers.append(agreement)
        extras.observe(layer, walks)
        progress(_note(agreement), layer + 1, count)
    inputs = _head_inputs(reference, walks[0], windows), _head_inputs(this, walks[1], windows)
    del walks
    true, drafts = _true_ids(windows), []
    has_mtp = all(model.config.num_nextn_predict_layers for model in (reference, this))
    if extras.drafts and has_mtp and len(windows[0]) > 2:
        drafts = [drafted(model, read, windows) for model, read in zip((reference, this), inputs, strict=True)]
    wanted = torch.cat([true, *map(wanted_of, drafts)], dim=1)
    kl, first, second = divergence((reference, this), inputs, wanted)
    found_nll = [-side.log_probabilities[:, 0] for side in (first, second)]
    _check_numbers(kl, f"{this.directory}: KL")
    shape = (len(windows), -1)
    return FidelityComparison(
        kl.view(shape), found_nll[0].view(shape), found_nll[1].view(shape), (first.best == second.best).view(shape),
        (first.best == true[:, 0]).view(shape), (second.best == true[:, 0]).view(shape), layers,
        drafts=_accepted((first, second), drafts) if drafts else None,
    )  # fmt: skip


def _accepted(mains: tuple[Softmax, Softmax], drafts: list[torch.Tensor]) -> DraftComparison:
    """Each model's drafts judged by its own main model; wanted column 0 is the true token."""
    (greedy_a, sampled_a), (greedy_b, sampled_b) = (
        accepted(main, number + 1, own) for number, (main, own) in enumerate(zip(mains, drafts, strict=True))
    )
    return DraftComparison(greedy_a, greedy_b, sampled_a, sampled_b)


@dataclass
class ReferencePositions:
    """The reference at every predicted position of `windows`: log-probabilities fp64 [T, K] of chosen ids, and the
    most probable id [T]."""

    log_probabilities: torch.Tensor
    best: torch.Tensor


@torch.no_grad()
def reference_at(
    against: Path, windows: list[torch.Tensor], wanted: torch.Tensor, progress: Progress = silent
) -> ReferencePositions:
    """The reference alone, for comparisons with what a server says; `wanted` int64 [T, K].

    Raises:
        CheckFailedError: NaN or infinity.
    """
    model = StoredModel(against)
    count, experts = model.config.num_hidden_layers, model.config.n_routed_experts
    walk = Walk(model, windows)
    progress("embedding", 0, count)
    for layer in range(count):
        _step(walk, layer, against, _expert_progress(progress, layer, count, 0, experts))
        progress("reference", layer + 1, count)
    found = softmax_of(model, _head_inputs(model, walk, windows), wanted)
    _check_numbers(found.log_sum, f"{against}: logits")
    return ReferencePositions(found.log_probabilities, found.best)


def _expert_progress(progress: Progress, layer: int, layers: int, before: int, experts: int) -> Callable[[int], None]:
    """Reports the routed experts of a layer, of which `before` of `experts` are done."""

    def expert_done(expert: int) -> None:
        progress(f"layer {layer} expert {expert}", layer + (before + expert + 0.5) / (experts + 1), layers)

    return expert_done


def _step(walk: Walk, layer: int, path: Path, expert_done: Callable[[int], None]) -> None:
    walk.step(layer, expert_done)
    _check_numbers(walk.hidden, f"{path}: layer {layer}: the residual stream")


def _check_numbers(values: torch.Tensor, what: str) -> None:
    if not torch.isfinite(values).all():
        rows = (~torch.isfinite(values.view(len(values), -1))).any(1).sum()
        raise CheckFailedError(
            f"{what} has NaN or infinity at {rows} of {len(values)} positions",
            "run glm5-ascend verify DIR --against SRC",
        )


def _head_inputs(model: StoredModel, walk: Walk, windows: list[torch.Tensor]) -> torch.Tensor:
    """What the head reads at every position that has a next token."""
    hidden = walk.hidden.view(len(windows), -1, walk.hidden.shape[1])[:, :-1].flatten(0, 1)
    walk.hidden = torch.empty(0)
    return model.final_norm(hidden)


def _true_ids(windows: list[torch.Tensor]) -> torch.Tensor:
    """int64 [T, 1]: the token behind every predicted position."""
    return torch.cat([window[1:] for window in windows])[:, None]


def _same_experts(walks: tuple[Walk, Walk]) -> torch.Tensor | None:
    a, b = (walk.experts for walk in walks)
    if a is None or b is None:
        return None
    share = (a[:, :, None] == b[:, None, :]).any(-1).float().mean(-1)
    return torch.stack([share[span].mean() for span in walks[0].spans])


def _same_keys(config: ModelConfig, layer: int, walks: tuple[Walk, Walk]) -> torch.Tensor | None:
    topk = config.index_topk
    if not config.has_indexer(layer) or len(walks[0].hidden) // len(walks[0].spans) <= topk:
        return None
    shares = []
    for a, b in zip(walks[0].selections, walks[1].selections, strict=True):
        assert a is not None and b is not None
        shares.append(count_common(a[topk:], b[topk:]) / (topk * (len(a) - topk)))
    return torch.tensor(shares)


def _note(found: LayerAgreement) -> str:
    notes = []
    if found.experts is not None:
        notes.append(f"same experts {found.experts.mean():.2%}")
    if found.indexer is not None:
        notes.append(f"same keys {found.indexer.mean():.2%}")
    return "  ".join(notes)
