"""`glm5-ascend analyze`: the recipe it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from glm5_ascend.demo_model.resources import write_demo_model
from glm5_ascend.errors import RecipeError
from glm5_ascend.fidelity.analysis.budget import final_types, propose
from glm5_ascend.fidelity.analysis.html import standing_out, verdict
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.windows import read_windows
from tests.support.command import assert_one_clear_line, in_process
from tests.support.report_page import (
    SCHEMES_AND_WIDTHS,
    assert_self_contained,
    hovered,
    marks,
    needs_chromium,
    shown,
)
from tests.support.tiny_model import write_calibration, write_tiny_model

W4, W8, FLOAT = "W4A8_DYNAMIC", "W8A8_DYNAMIC", "FLOAT"
SMALL = ["--samples", 4, "--seq-len", 256, "--json", "--quiet"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="module")
def proposal(demo: Path) -> tuple[dict[str, object], Path, Path]:
    """(report, recipe, HTML) for a budget of 11.2 MB; the recipe alone makes 10.6 MB."""
    recipe, html = demo.parent / "mine.yaml", demo.parent / "report.html"
    done = in_process("analyze", demo, *SMALL, "--budget", "11.2MB", "--out", recipe, "--html", html)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), recipe, html


def test_the_recipe_pays(proposal: tuple[dict[str, object], Path, Path], demo: Path) -> None:
    """Quantizing with it takes the bytes that were predicted, and KL on held-out text falls well below the stock's."""
    report, recipe, _ = proposal
    kl = {}
    windows = read_windows(None, demo, 256, 6)
    for name, path in (("w4a8", "w4a8"), ("mine", str(recipe))):
        out = demo.parent / name
        assert in_process("quantize", demo, out, "--recipe", path, "--quiet").returncode == 0
        assert in_process("verify", out, "--against", demo, "--quiet").returncode == 0
        kl[name] = {row.name: row.value for row in metrics(compare(out, demo, windows))}["kl_mean"]
    assert kl["mine"] < 0.5 * kl["w4a8"]
    stored = {
        name: sum(t.nbytes for file in (demo.parent / name).rglob("*.safetensors") for t in load_file(file).values())
        for name in kl
    }
    assert stored == {"w4a8": report["recipe_bytes"], "mine": report["predicted_bytes"]}
    assert stored["w4a8"] < stored["mine"] <= 11.2e6
    description = json.loads((demo.parent / "mine" / "quant_model_description.json").read_text())
    for change in report["fallbacks"]:  # type: ignore[attr-defined]
        module = change["modules"][0].replace("experts.*", "experts.3.up_proj")
        assert description[f"{module}.weight"] == change["to"] != change["from"]


def test_the_recipe_says_where_it_comes_from(proposal: tuple[dict[str, object], Path, Path]) -> None:
    text = proposal[1].read_text()
    assert text.startswith("# w4a8 with fall-backs, by glm5-ascend analyze") and "Assumed" in text
    assert yaml.safe_load(text)["metadata"]["config_id"] == "w4a8-fallbacks"
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_report_says_where_it_comes_from(proposal: tuple[dict[str, object], Path, Path]) -> None:
    text = assert_self_contained(proposal[2]).text
    for part in ("glm5-ascend analyze", "--budget 11.2MB", "w4a8, SHA-256", "calibration.jsonl, SHA-256", "1234"):
        assert part in text, part
    assert "of 29 units make most of the noise: layer 4 routed experts" in text


def test_what_stands_out() -> None:
    """The fewest units with 80 % of the energy; none where more than half are needed."""
    units = [unit(layer, W8, {W8: noise}, {}) for layer, noise in enumerate((1.0, 70.0, 15.0, 5.0, 9.0))]
    assert [each.layer for each in standing_out(units)] == [1, 2]
    assert verdict(units).grade == "fair" and "2 of 5 units" in verdict(units).text
    even = [unit(layer, W8, {W8: 1.0}, {}) for layer in range(10)]
    assert len(standing_out(even)) == 8 and verdict(even).grade == "good"
    assert standing_out([]) == [] and verdict([]).grade == "open"
    assert verdict([unit(0, W8, {W8: 0.0}, {})]).grade == "open"


@needs_chromium
@pytest.mark.parametrize(("scheme", "width"), SCHEMES_AND_WIDTHS)
def test_the_report(proposal: tuple[dict[str, object], Path, Path], scheme: str, width: int) -> None:
    report, _, html = proposal
    with shown(html, scheme, width) as page:
        assert f"{report['noise_removed'] / report['noise']:.1%}" in page.inner_text("#noise_removed")  # type: ignore[operator]
        assert marks(page, "Noise by layer", "rect").count() == 5
        assert marks(page, "Expert usage", "rect").count() == 4 * 16
        for what in ("activations", "weights"):
            for state in ("source", "rotated", "smoothed"):
                assert marks(page, f"Outliers of {what}, {state}", "rect").count() >= 5 * 4
        assert "layer 4 routed experts" in hovered(page, "Noise by unit", "rect")
        page_ = assert_self_contained(html)
        chart = next(spec for spec in page_.specs if "from" in spec["data"]["values"][0])
        heights = [row["rows"] for row in chart["data"]["values"]]
        counts = torch.tensor([layer["weight_scales"].get(W4, [0] * 48) for layer in report["layers"]]).sum(0)  # type: ignore[attr-defined]
        assert heights == pytest.approx(counts.tolist())


def unit(layer: int, scheme: str, noise: dict[str, float], nbytes: dict[str, int]) -> Unit:
    modules = ("mlp.experts.0.up_proj",) if scheme == W4 else ("self_attn.o_proj",)
    return Unit(layer, modules, scheme, {FLOAT: 0.0, **noise}, nbytes, prefix=f"model.layers.{layer}.")


def test_greedy_by_noise_per_byte() -> None:
    experts = unit(1, W4, {W4: 1.0, W8: 0.1}, {W4: 100, W8: 200, FLOAT: 400})
    attention = unit(1, W8, {W8: 0.3}, {W8: 10, FLOAT: 20})
    quiet = unit(2, W8, {W8: 0.0}, {W8: 10, FLOAT: 20})
    units = [experts, attention, quiet]

    def types(budget: int) -> dict[str, str]:
        return {u.label: scheme for u, scheme in final_types(propose(units, 120, budget))}

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
    assert_one_clear_line(in_process(*base, "--html", calib), 2, "calib.jsonl", "no report")
    assert_one_clear_line(in_process(*base, "--recipe", "w3a3"), 2, "w3a3")
    assert_one_clear_line(in_process("analyze", tmp_path / "nowhere"), 2, "nowhere")
    assert_one_clear_line(in_process(*base[:2], "--calib", tmp_path / "none.txt"), 2, "none.txt")
    for arguments in (["--budget", "plenty"], ["--out", tmp_path / "r.yaml"]):
        done = in_process(*base, *arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not (tmp_path / "r.yaml").exists() and calib.read_text().startswith('"def rotate')


def test_not_a_number_fails_the_check(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    file = next(source.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.mlp.shared_experts.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    calib = write_calibration(tmp_path / "calib.jsonl")
    done = in_process("analyze", source, "--calib", calib, "--samples", 2, "--seq-len", 32, "--recipe", "rtn-w4a8")
    assert_one_clear_line(done, 2, "model.layers.1.mlp.shared_experts.up_proj.weight", "NaN")
