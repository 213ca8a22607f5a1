"""The three stages of training: dense attention, indexer warm-up, sparse attention."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Mode, Packed, packed
from .rows import Batch, RowSource
from .trunk import MtpLayer, trunk_forward

BALANCE_RATE = 5e-3
LOG_EVERY = 10
WARMUP = 0.02


@dataclass
class Run:
    """A model in training."""

    model: Any
    mtp: MtpLayer
    source: RowSource
    bf16: bool = True
    seen: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def next_token_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy: [N, vocab], [N], [N] -> scalar."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def main_loss(run: Run, batch: Batch, hidden: Tensor) -> Tensor:
    """Loss of the model's own head."""
    logits = run.model.lm_head(hidden[:, :-1].flatten(0, 1))
    return next_token_loss(logits, batch.tokens[:, 1:].flatten(), batch.weights[:, 1:].flatten())


def mtp_loss(run: Run, batch: Batch, hidden: Tensor, layout: Packed, mode: Mode) -> tuple[Tensor, Tensor]:
    """Loss of the MTP layer on token i + 2, and the divergence of its indexer."""
    following = run.model.model.embed_tokens(batch.tokens.roll(-1, 1))
    states, divergence = run.mtp(hidden, following, layout, mode, learn=True)
    logits = run.model.lm_head(states[:, :-2].flatten(0, 1))
    same = batch.segments[:, :-2] == batch.segments[:, 2:]
    weights = torch.where(same, batch.weights[:, 2:], 0.0)
    return next_token_loss(logits, batch.tokens[:, 2:].flatten(), weights.flatten()), divergence


def balance(run: Run) -> float:
    """Nudge every router's bias towards equal loads; returns the largest load relative to the mean."""
    worst = 0.0
    for block in [*run.model.model.layers, run.mtp.block]:
        load = getattr(getattr(block.mlp, "gate", None), "load", None)  # stage A leaves the MTP layer alone
        if load is not None:
            share = load.float() / load.float().mean()
            block.mlp.gate.e_score_correction_bias += BALANCE_RATE * torch.sign(1.0 - share)
            worst = max(worst, share.max().item())
    return worst


def dense_step(run: Run, batch: Batch, layout: Packed) -> dict[str, Tensor]:
    """Stage A: the model alone, every token visible."""
    hidden, _ = trunk_forward(run.model, batch.tokens, layout, "dense", learn=False)
    return {"lm": main_loss(run, batch, hidden)}


def warmup_step(run: Run, batch: Batch, layout: Packed) -> dict[str, Tensor]:
    """Stage B: indexers learn the attention of the frozen model; the MTP layer learns to predict."""
    hidden, divergence = trunk_forward(run.model, batch.tokens, layout, "warmup", learn=True)
    ahead, last = mtp_loss(run, batch, hidden.detach(), layout, "warmup")
    return {"index": torch.stack([*divergence, last]).mean(), "mtp": ahead}


def sparse_step(run: Run, batch: Batch, layout: Packed) -> dict[str, Tensor]:
    """Stage C: everything learns with sparse attention."""
    hidden, divergence = trunk_forward(run.model, batch.tokens, layout, "sparse", learn=True)
    ahead, last = mtp_loss(run, batch, hidden.detach(), layout, "sparse")
    index = torch.stack([*divergence, last]).mean()
    return {"lm": main_loss(run, batch, hidden), "index": index, "mtp": 0.5 * ahead}


TrainStep = Callable[[Run, Batch, Packed], dict[str, Tensor]]


def rate_at(done: float, first: float, last: float, flat: float) -> float:
    """Learning-rate share: up over 2 %, `first` until `flat` of the stage is done, then linearly to `last`."""
    if done < WARMUP:
        return first * (0.05 + done / WARMUP * 0.95)
    return first if done < flat else first + (last - first) * (done - flat) / (1.0 - flat)


def train_stage(
    run: Run, name: str, step: TrainStep, optimizers: list[Any], steps: int, rates: tuple[float, float, float]
) -> None:
    """Run one stage, in which `step` gives the losses whose sum is minimised; prints a line every 10 steps.

    Args:
        rates: `first`, `last` and `flat` of `rate_at`.
    """
    started = time.monotonic()
    weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
    share = lambda done: rate_at(done / steps, *rates)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    for count in range(1, steps + 1):
        batch = run.source.batch()
        layout = packed(run.model.model.rotary_emb, batch.segments, batch.positions)
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
            losses = step(run, batch, layout)
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        run.model.zero_grad()
        run.mtp.zero_grad()
        worst = balance(run) if step is not warmup_step else 0.0
        run.seen += batch.tokens.numel()
        if count % LOG_EVERY == 0:
            line: dict[str, Any] = {key: round(loss.item(), 4) for key, loss in losses.items()}
            line = {"stage": name, "step": count, **line, "load": round(worst, 2), "tokens": run.seen}
            line["seconds"] = round(time.monotonic() - started, 1)
            if not math.isfinite(sum(value for key, value in line.items() if key in losses)):
                raise FloatingPointError(f"loss is not finite in stage {name}, step {count}")
            run.history.append(line)
            print(json.dumps(line), flush=True)
