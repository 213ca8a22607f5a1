"""The three stages of training: dense attention, indexer warm-up, sparse attention."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import optim
from .attention import Mode, Packed, packed
from .flash import no_rotation
from .rows import Batch, RowSource
from .trunk import MtpLayer, text_model, trunk_forward

BALANCE_RATE = 5e-3
LOG_EVERY = 10
WARMUP = 0.02


@dataclass
class Run:
    """A model in training."""

    model: Any
    mtp: MtpLayer | None
    source: RowSource
    log: Path
    bf16: bool = True
    seen: int = 0
    answer: float = 4.0  # running mean of the answers' loss
    history: list[dict[str, Any]] = field(default_factory=list)


def answer_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> float:
    """Mean cross-entropy of the tokens the model must say in chats, for the log."""
    spoken = weights == 1.0
    return F.cross_entropy(logits[spoken].float(), targets[spoken]).item() if spoken.any() else 0.0


def next_token_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy: [N, vocab], [N], [N] -> scalar."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def main_loss(run: Run, batch: Batch, hidden: Tensor) -> Tensor:
    """Loss of the model's own head; leaves the part of the answers in `run.answer`."""
    logits = run.model.lm_head(hidden[:, :-1].flatten(0, 1))
    targets, weights = batch.tokens[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    with torch.no_grad():
        run.answer = 0.95 * run.answer + 0.05 * answer_loss(logits, targets, weights)
    return next_token_loss(logits, targets, weights)


def mtp_loss(run: Run, batch: Batch, hidden: Tensor, layout: Packed, mode: Mode) -> tuple[Tensor, Tensor | None]:
    """Loss of the MTP layer on token i + 2 (0 without one), and the divergence of its indexer."""
    if run.mtp is None:
        return hidden.new_zeros(()), None
    following = run.model.model.embed_tokens(batch.tokens.roll(-1, 1))
    states, divergence = run.mtp(hidden, following, layout, mode, learn=True)
    logits = run.model.lm_head(states[:, :-2].flatten(0, 1))
    same = batch.segments[:, :-2] == batch.segments[:, 2:]
    weights = torch.where(same, batch.weights[:, 2:], 0.0)
    return next_token_loss(logits, batch.tokens[:, 2:].flatten(), weights.flatten()), divergence


def balance(run: Run) -> float:
    """Nudge every router's bias towards equal loads; returns the largest load relative to the mean."""
    worst = 0.0
    for block in [*text_model(run.model).layers, *([run.mtp.block] if run.mtp else [])]:
        load = getattr(block.mlp, "load", None)
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
    return {"index": torch.stack([*divergence, last] if last is not None else divergence).mean(), "mtp": ahead}


def sparse_step(run: Run, batch: Batch, layout: Packed) -> dict[str, Tensor]:
    """Stage C: everything learns with sparse attention."""
    hidden, divergence = trunk_forward(run.model, batch.tokens, layout, "sparse", learn=True)
    ahead, last = mtp_loss(run, batch, hidden.detach(), layout, "sparse")
    divergence = [*divergence, last] if last is not None else divergence
    return {"lm": main_loss(run, batch, hidden), "index": torch.stack(divergence).mean(), "mtp": 0.5 * ahead}


TrainStep = Callable[[Run, Batch, Packed], dict[str, Tensor]]


def rate_at(done: float, first: float, last: float, flat: float) -> float:
    """Learning-rate share: up over 2 %, `first` until `flat` of the stage is done, then linearly to `last`."""
    if done < WARMUP:
        return first * (0.05 + done / WARMUP * 0.95)
    return first if done < flat else first + (last - first) * (done - flat) / (1.0 - flat)


def train_stage(
    run: Run, name: str, step: TrainStep, optimizers: list[Any], steps: int, rates: tuple[float, float, float]
) -> None:
    """Run one stage; every 10 steps one line goes to the log.

    Args:
        run: the model and its data.
        name: for the log.
        step: gives the losses whose sum is minimised.
        optimizers: what to update.
        steps: how many.
        rates: `first`, `last` and `flat` of `rate_at`.
    """
    started = time.monotonic()
    rotary = getattr(text_model(run.model), "rotary_emb", no_rotation)
    weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
    for count in range(1, steps + 1):
        optim.set_rate(optimizers, rate_at((count - 1) / steps, *rates))
        batch = run.source.batch()
        layout = packed(rotary, batch.segments, batch.positions)
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
            losses = step(run, batch, layout)
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        run.model.zero_grad()
        if run.mtp is not None:
            run.mtp.zero_grad()
        worst = balance(run) if step is not warmup_step else 0.0
        run.seen += batch.tokens.numel()
        if count % LOG_EVERY == 0:
            line: dict[str, Any] = {key: round(loss.item(), 4) for key, loss in losses.items()}
            line = {"stage": name, "step": count, **line, "answer": round(run.answer, 4)}
            line |= {"load": round(worst, 2), "tokens": run.seen}
            line["seconds"] = round(time.monotonic() - started, 1)
            if not math.isfinite(sum(value for key, value in line.items() if key in losses)):
                raise FloatingPointError(f"loss is not finite in stage {name}, step {count}")
            run.history.append(line)
            with run.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
