"""Against the source: another run's seed, another model, and outliers that are coarse by right."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.verify import verify
from tests.conftest import Copy, Quantized
from tests.support.tiny_model import edited_tensors, write_tiny_model
from tests.verify.support.editor import PROVENANCE, Checkpoint

LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts."
UP, DOWN = f"{EXPERT}2.up_proj", f"{EXPERT}2.down_proj"


def test_seed_of_another_run(tiny_w4a8: Path, tiny_source: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    with checkpoint.json(PROVENANCE) as provenance:
        provenance["seed"] = 7
    report = verify(checkpoint.directory, against=tiny_source)
    assert {f.id for f in report.findings} == {"against.rotation", "against.skipped"}


def test_another_model(tiny_w4a8: Path, tmp_path: Path) -> None:
    report = verify(tiny_w4a8, against=write_tiny_model(tmp_path / "other", seed=5))
    wrong_modules = {f.tensor for f in report.findings if f.id == "against.mismatch"}
    assert {f"{UP}.weight", f"{DOWN}.weight", "model.embed_tokens.weight"} <= wrong_modules
    smaller = verify(tiny_w4a8, against=write_tiny_model(tmp_path / "smaller", n_routed_experts=2))
    assert [f.id for f in smaller.findings] == ["against.config"]


@pytest.mark.parametrize(("row", "column"), [(3, 3), (3, 7)])
def test_a_dead_channel_hides_no_other_damage(
    tiny_quantized: Quantized, tmp_path: Path, editable: Copy, row: int, column: int
) -> None:
    """A column of a dead channel that holds other values, and a live column that was emptied, are both found."""
    source = write_tiny_model(tmp_path / "dead")
    with edited_tensors(source) as tensors:
        tensors[f"{UP}.weight"][row] = 0
    checkpoint = Checkpoint(editable(tiny_quantized("w8a8", source)))
    weight = checkpoint.read(f"{DOWN}.weight").clone()
    weight[:, column] = weight[:, 9] if column == row else 0
    checkpoint.store({f"{DOWN}.weight": weight})
    report = verify(checkpoint.directory, against=source)
    assert f"{DOWN}.weight" in {f.tensor for f in report.findings if f.id == "against.mismatch"}
