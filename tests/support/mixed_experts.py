"""A recipe as `analyze` writes it: INT4 experts, and INT8 ones in one layer."""

from __future__ import annotations

from pathlib import Path

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
