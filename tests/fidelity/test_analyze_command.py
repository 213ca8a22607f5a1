"""`glm5-ascend analyze`: the recipe it writes, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from glm5_ascend.errors import RecipeError
from glm5_ascend.fidelity.analysis.budget import final_types, propose
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.fidelity.evaluation.compare import compare
from tests.support.command import assert_one_clear_line, in_process, worked
from tests.support.tiny_model import write_calibration

W4, W8, FLOAT = "W4A8_DYNAMIC", "W8A8_DYNAMIC", "FLOAT"


def test_the_proposal_lowers_kl_within_the_budget(tiny_source: Path, tiny_w4a8: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "mine.yaml", tmp_path / "out"
    calib = write_calibration(tmp_path / "calib.jsonl")
    budget = int(1.3 * stored_bytes(tiny_w4a8))
    small = ["--calib", calib, "--samples", 4, "--seq-len", 64, "--json"]
    done = worked(in_process("analyze", tiny_source, *small, "--budget", budget, "--out", recipe))
    report, text = json.loads(done.stdout), recipe.read_text()
    assert text.startswith("# w4a8 with fall-backs, by glm5-ascend analyze") and "Assumed" in text
    assert yaml.safe_load(text)["metadata"]["config_id"] == "w4a8-fallbacks"
    assert in_process("quantize", tiny_source, out, "--recipe", recipe, "--calib", calib, "--quiet").returncode == 0
    windows = list(torch.randint(7, 263, (8, 64), generator=torch.Generator().manual_seed(3)))
    kl, kl_w4a8 = (float(compare(path, tiny_source, windows).kl.mean()) for path in (out, tiny_w4a8))
    assert kl < 0.5 * kl_w4a8
    assert stored_bytes(tiny_w4a8) == report["recipe_bytes"]
    assert report["recipe_bytes"] < stored_bytes(out) == report["predicted_bytes"] <= budget
    description = json.loads((out / "quant_model_description.json").read_text())
    for change in report["fallbacks"]:
        module = change["modules"][0].replace("experts.*", "experts.3.up_proj")
        assert description[f"{module}.weight"] == change["to"] != change["from"]


def stored_bytes(checkpoint: Path) -> int:
    return sum(t.nbytes for file in checkpoint.rglob("*.safetensors") for t in load_file(file).values())


def unit(layer: int, scheme: str, noise: dict[str, float], nbytes: dict[str, int]) -> Unit:
    modules = ("mlp.experts.0.up_proj",) if scheme == W4 else ("self_attn.o_proj",)
    return Unit(layer, modules, scheme, {FLOAT: 0.0, **noise}, nbytes, prefix=f"model.layers.{layer}.")


def test_greedy_by_noise_per_byte() -> None:
    experts = unit(1, W4, {W4: 1.0, W8: 0.1}, {W4: 100, W8: 200, FLOAT: 400})
    attention = unit(1, W8, {W8: 0.3}, {W8: 10, FLOAT: 20})
    quiet = unit(2, W8, {W8: 0.0}, {W8: 10, FLOAT: 20})
    units = [experts, attention, quiet]

    def types(budget: int) -> dict[str, str]:
        return {unit.label: scheme for unit, scheme in final_types(propose(units, 120, budget))}

    assert types(129) == {}
    assert types(130) == types(200) == {attention.label: FLOAT}  # 0.03 a byte before 0.009
    assert types(230) == {attention.label: FLOAT, experts.label: W8}
    assert types(430) == {attention.label: FLOAT, experts.label: FLOAT}  # 0.1 noise left, 200 bytes
    with pytest.raises(RecipeError, match="alone makes 120"):
        propose(units, 120, 119)


def test_bad_input(tiny_source: Path, tmp_path: Path) -> None:
    calib = write_calibration(tmp_path / "calib.jsonl")
    base = ["analyze", tiny_source, "--calib", calib, "--samples", 2, "--seq-len", 32]
    assert_one_clear_line(in_process(*base, "--budget", "1kB"), 2, "--budget", "alone makes")
    assert_one_clear_line(in_process(*base, "--budget", "1GB", "--out", calib), 2, "calib.jsonl", "exists")
    assert_one_clear_line(in_process(*base, "--recipe", "w3a3"), 2, "w3a3")
    assert_one_clear_line(in_process("analyze", tmp_path / "nowhere"), 2, "nowhere")
    assert_one_clear_line(in_process(*base[:2], "--calib", tmp_path / "none.txt"), 2, "none.txt")
    for arguments in (["--budget", "plenty"], ["--out", tmp_path / "r.yaml"]):
        done = in_process(*base, *arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not (tmp_path / "r.yaml").exists() and calib.read_text().startswith('"def rotate')
