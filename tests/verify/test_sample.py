"""`--sample`: whole layers and experts drawn by a seed, of every kind some; the structure of all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glm5_ascend.errors import Glm5Error
from glm5_ascend.model.config_file import load_config
from glm5_ascend.verify import verify
from glm5_ascend.verify.sample import Share
from tests.conftest import Copy
from tests.verify.support.editor import Checkpoint

EXPERTS = "model.layers.{}.mlp.experts.{}.gate_proj"


def kinds(modules: frozenset[str]) -> set[str]:
    return {re.sub(r"\.\d+\.", ".N.", name) for name in modules}


def test_a_fault_is_found_where_the_sample_reads(tiny_w4a8: Path, tiny_source: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    config = load_config(out)
    whole, few, other = (Share.parse(text).of(config, {}) for text in ("100%", "2%", "2%,seed=7"))
    assert few < whole and few == Share.parse("2%").of(config, {}) != other
    assert kinds(few) == kinds(whole)
    clean = verify(out, sample="2%", against=tiny_source)
    assert clean.findings == [] and any("--sample" in sentence for sentence in clean.unchecked)
    compared = {row.module for row in clean.errors_by_tensor or ()}
    names = {EXPERTS.format(layer, expert) for layer in (1, 2) for expert in range(config.n_routed_experts)}
    read, unread = min(names & compared), min(names - compared)
    checkpoint = Checkpoint(out)
    for name in (read, unread):
        checkpoint.store({f"{name}.weight_scale": -checkpoint.read(f"{name}.weight_scale")})
    assert {f.tensor for f in verify(out, sample="2%").findings if f.id == "value.scale"} == {f"{read}.weight_scale"}
    everything = {f.tensor for f in verify(out, sample="100%").findings if f.id == "value.scale"}
    assert everything == {f"{name}.weight_scale" for name in (read, unread)}


def test_structure_is_checked_whole(tiny_w4a8: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    few = Share.parse("1%").of(load_config(checkpoint.directory), {})
    lost = next(name for layer in (1, 2) for expert in range(4) if (name := EXPERTS.format(layer, expert)) not in few)
    checkpoint.store({f"{lost}.weight": None})
    assert "tensor.missing" in {f.id for f in verify(checkpoint.directory, sample="1%").findings}


@pytest.mark.parametrize("text", ["", "2", "0%", "101%", "2%,seed=x", "-1%", "nan%"])
def test_what_is_no_share_is_refused(text: str, tiny_w4a8: Path) -> None:
    with pytest.raises(Glm5Error, match="--sample"):
        verify(tiny_w4a8, sample=text)
