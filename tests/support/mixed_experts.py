"""Experts in other forms: INT4 and INT8 ones by a recipe as `analyze` writes it; fused tensors of transformers 5."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from glm5_ascend.checkpoint.schemes import W8A8_DYNAMIC
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.fidelity.analysis.recipe import with_fallbacks
from glm5_ascend.fidelity.analysis.units import units
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe


def write_mixed_experts(path: Path, source: Path, layer: int) -> Path:
    """`w4a8` with the routed experts of one layer of `source` in INT8."""
    stock = find_recipe("w4a8")
    plan = QuantizationPlan(open_source(source), load_recipe(stock))
    changes = [(unit, W8A8_DYNAMIC) for unit in units(plan, layer) if unit.experts]
    path.write_text(yaml.safe_dump(with_fallbacks(stock, plan.config, changes)))
    return path


def fused_experts(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Four experts as transformers 5 holds them: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    gate, up, down = (
        torch.stack([tensors[f"{prefix}{expert}.{linear}.weight"] for expert in range(4)])
        for linear in ("gate_proj", "up_proj", "down_proj")
    )
    return {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
