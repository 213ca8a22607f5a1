"""Muon for the matrices inside the layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from glm5_ascend.model.device import native_bf16

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic of the Muon method: quick, singular values land near 1

ROUTER_SHARE = 0.3  # a quick router sends everything to one expert before the balancing bias can answer


def quick_dtype() -> torch.dtype:
    """The dtype this CPU multiplies matrices fastest in."""
    return torch.bfloat16 if native_bf16(torch.device("cpu")) else torch.float32


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """[..., m, n] -> the same with all singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    wide = update.shape[-2] <= update.shape[-1]
    x = (update if wide else update.mT).to(quick_dtype())  # exactness is no aim here, speed is
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    done: Tensor = (x if wide else x.mT).to(update.dtype)
    return done


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised; stacks of matrices [E, m, n] count as E matrices."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95, decay: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                average = state["momentum"]
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"])
                gate_and_up = weight.ndim == 3 and weight.shape[1] < weight.shape[2]  # two matrices
                shape = (-1, weight.shape[1] // 2, weight.shape[2]) if gate_and_up else weight.shape
                update = orthogonalise(update.view(shape)).view_as(weight)
                scale = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                weight.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def build(named: Iterable[tuple[str, Tensor]], muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """The two optimizers, at their peak rates."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    routers: list[Tensor] = []
    for name, weight in named:
        outside = any(part in name for part in ("embed_tokens", "lm_head", "weights_proj"))
        if "mlp.gate." in name:
            routers.append(weight)
        else:
            (others if weight.ndim < 2 or outside else matrices).append(weight)
    groups: list[dict[str, Any]] = [{"params": others}, {"params": routers, "lr": adam_lr * ROUTER_SHARE}]
    adam = torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    optimizers: list[torch.optim.Optimizer] = [adam]
    if matrices:
        optimizers.append(Muon(matrices, lr=muon_lr))
    return optimizers
