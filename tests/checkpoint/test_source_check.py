"""What verify would refuse in the output is refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.errors import CheckpointError, Glm5Error
from glm5_ascend.quantize.job import open_job
from glm5_ascend.quantize.options import QuantizeOptions
from tests.support.tiny_model import SHARED_INDEXER, change_json, edited_tensors, write_tiny_model
from tests.verify.faults import keys, texts
from tests.verify.faults.row import QUICK, Linked, Row

#: Some of the faults of verify's table that a source can have: what is copied, or written from it.
FAULTS = [
    row
    for row in (*keys.ROWS, *texts.ROWS)
    if row.level == "error" and QUICK in row.modes and row.kind in (keys.C, texts.T, texts.S, texts.J, texts.G)
    if row.part != "quantization_config"  # an FP8 source has one, the output has not
][::4]


def with_tensors(directory: Path, *names: str, **config: object) -> QuantizeOptions:
    """A job on a tiny model that has these tensors as well."""
    write_tiny_model(directory, index=False, **config)
    with edited_tensors(directory) as tensors:
        tensors |= {name: torch.ones(2) for name in names}
    return QuantizeOptions(directory, directory.parent / "out")


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    names = ["model.layers.1.self_attn.q_norm.weight", *(f"vision.{i}.weight" for i in range(4))]
    with pytest.raises(
        CheckpointError, match=r"5 tensors .*model\.layers\.1\.self_attn\.q_norm\.weight, vision\.0"
    ) as e:
        open_job(with_tensors(tmp_path / "source", *names))
    assert "vision.3" not in e.value.message and e.value.message.endswith(", ...")


def test_layers_that_config_json_forgets_are_not_lost(tmp_path: Path) -> None:
    job = with_tensors(tmp_path / "source")
    change_json(tmp_path / "source" / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"tensors are of no module .*model\.layers\.3\."):
        open_job(job)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_unused_buffers_are_allowed(name: str, tmp_path: Path) -> None:
    open_job(with_tensors(tmp_path / "source", name))


def test_indexers_of_sharing_layers_are_allowed(tmp_path: Path) -> None:
    """vLLM drops them, and verify only warns."""
    open_job(with_tensors(tmp_path / "source", "model.layers.3.self_attn.indexer.wk.weight", **SHARED_INDEXER))


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.name)
def test_what_verify_refuses_is_refused(row: Row, tiny_source: Path, tmp_path: Path) -> None:
    ck = Linked(tiny_source, tmp_path / "source")
    row.edit(ck)
    with pytest.raises(Glm5Error) as refused:
        open_job(QuantizeOptions(ck.directory, tmp_path / "out"))
    assert refused.value.exit_code == 2 and refused.value.tip
    assert len(refused.value.message.splitlines()) == 1 and not (tmp_path / "out").exists()
