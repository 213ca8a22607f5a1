"""Time: what the prediction counts."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.quantize.estimate import time as estimate
from glm5_ascend.quantize.job import prepare
from glm5_ascend.quantize.options import QuantizeOptions


def test_preparing_gptq_is_counted_where_a_recipe_has_it(tiny_source: Path, tmp_path: Path) -> None:
    plain, best = (prepare(QuantizeOptions(tiny_source, tmp_path / name, name)).plan for name in ("w4a8", "w4a8-best"))
    assert estimate._preparing(plain, tokens=512) == 0
    assert estimate._preparing(best, tokens=512) > 0
