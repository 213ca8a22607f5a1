"""`glm5-ascend plan` as a user runs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.cli import run
from glm5_ascend.demo_model.resources import write_demo_model
from glm5_ascend.plan import plan as make_plan
from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.layout import check_engine, parse_layout
from glm5_ascend.plan.model import named
from glm5_ascend.plan.proven import entries
from tests.conftest import Quantized
from tests.support.command import in_process, said, worked
from tests.support.tiny_model import write_tiny_model


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(["plan", *map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_json_says_where_its_numbers_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "--model", "glm-5.2", "--quant", "w8a8", "--nodes", 2)
    assert report["kv_bytes_per_token"]["basis"] == "derived"
    assert report["weight_bytes_total"]["high"] == 773_778_904_680
    assert report["evidence"]["tag"] in ("proven", "derived") and report["evidence"]["source"]
    assert report["nearest"]["measured"]["tok_s"] > 0


def test_a_layout_is_evaluated_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "--quant", "w4a8", "--layout", "tp=16, dp=1", "--mtp", 3)
    assert report["engines"] == {"server": {"tp": 16, "dp": 1, "pp": 1, "ep": 16, "dcp": 1, "mtp": 3}}
    assert report["weight_bytes_per_die"]["value"] == pytest.approx(28.0e9, rel=0.01)
    assert report["evidence"]["tag"] == "proven" and report["nodes"] == 1


def test_a_checkpoint_of_few_positions_gets_a_load_that_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo has 2,048 positions, the usual load 5,000 tokens."""
    directory = str(write_demo_model(tmp_path / "demo"))
    assert run(["plan", directory]) == 0
    assert "1,433 tokens in, 614 out" in capsys.readouterr().out
    assert run(["plan", directory, "--workload", "in=3500,out=1500"]) == 2


def test_settings_of_a_prefill_engine_count(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "tp=4,dp=8,prefill_tp=8,prefill_dp=4"
    load = ("--quant", "w8a8", "--workload", "in=32000,out=500,concurrency=32")
    usual, small = (
        plan(capsys, *load, "--layout", layout + more) for more in ("", ",prefill_tokens=2048,prefill_mtp=3,tokens=128")
    )
    assert small["ttft_ms"]["value"] != usual["ttft_ms"]["value"]
    assert "prefill_tokens=2048" in small["layout"]["text"] and small["engines"]["prefill"]["mtp"] == 3


def test_speeds_of_a_model_without_a_public_result_are_guessed(
    capsys: pytest.CaptureFixture[str], tiny_flash: Path, tiny_quantized: Quantized
) -> None:
    """The sizes of such a model, by name and from a checkpoint, are derived or measured."""
    small = (tiny_quantized("flash-w4a8", tiny_flash), "--workload", "in=64,out=32,concurrency=2")
    for asked in (("--model", "glm-5.3-flash", "--hardware", "a2"), small):
        report = plan(capsys, *asked)
        assert {report[name]["basis"] for name in ("tpot_ms", "ttft_ms", "output_tokens_per_s")} == {"guessed"}
        assert any("no public speed of GLM-5.3-Flash of this kind" in note for note in report["notes"])
        assert report["state_bytes_per_request"]["value"] > 0 and report["kv_bytes_per_token"]["basis"] == "derived"
        assert "DCP" not in json.dumps(report["others"])
    assert plan(capsys)["output_tokens_per_s"]["basis"] == "fitted"


def test_a_plan_by_name_needs_no_torch() -> None:
    code = "import sys; from glm5_ascend.cli import run; run(['plan']); sys.exit('torch' in sys.modules)"
    said(sys.executable, "-c", code)


def test_an_answer_of_one_token_has_no_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "--workload", "in=3500,out=1,concurrency=4", "--mtp", 0, "--layout", "tp=16")
    assert report["tpot_ms"]["value"] == 0 and report["ttft_ms"]["value"] > 0


def test_a_public_number_of_memory_is_in_its_range() -> None:
    """vllm-ascend 10918: GLM-5.2 bf16 on four A2, DP4 TP8: 2.01 GiB were left for the cache."""
    answer = make_plan(model="glm-5.2", quant="bf16", hardware="a2", nodes=4, layout="tp=8,dp=4,dsa_cp=0", mtp=3)
    budget = answer.numbers["kv_budget_bytes_per_die"]
    assert budget.low <= 2.01 * 2**30 <= budget.high and budget.value < 4 * 2**30


@pytest.mark.parametrize(
    ("arguments", "profile"),
    [
        ("--quant w4a8 --nodes 1 --workload in=1000,out=1000,concurrency=1", "a3-single-w4a8"),
        ("--quant w4a8 --hardware a2 --nodes 1 --workload in=3500,out=1500,concurrency=8", "a2-single-w4a8"),
        ("--model glm-5.2 --quant w4a8 --nodes 1", "a3-single-w4a8-dp2"),
        ("--model glm-5.2 --quant w4a8c8 --nodes 1 --workload in=1000000,out=1000", "a3-1m"),
        ("--model glm-5.3-flash --quant w4a8 --hardware a2 --nodes 1", "a2-single-flash"),
        ("--model GLM-5.3-Flash --quant w8a8 --nodes 1", "a3-single-flash"),
        # more requests or tokens than the profile allows, other settings, or another model
        ("--quant w4a8 --nodes 1 --workload in=3500,out=1500,concurrency=64", None),
        ("--quant w8a8 --nodes 1 --workload in=41000,out=100,concurrency=1", None),
        ("--quant w4a8 --layout tp=16,seqs=4", None),
        ("--quant w4a8 --nodes 1", None),
    ],
)
def test_the_profile_with_these_engines(
    capsys: pytest.CaptureFixture[str], arguments: str, profile: str | None
) -> None:
    report = plan(capsys, *arguments.split())
    assert report["profile"] == profile
    assert report["command_lines"][0].startswith(f"profile: {profile or 'none'}")


def test_every_documented_layout_is_possible_and_names_its_source() -> None:
    for entry in entries():
        model, hardware = named(entry.models[0], entry.experts), load_hardware(entry.hardware)
        layout = parse_layout(entry.layout, model.config, 1.0)
        for engine in layout.engines.values():
            check_engine(engine, model.config, hardware)
        assert entry.source and layout.nodes(hardware) == entry.nodes, entry


def test_a_model_without_mtp_beside_results_with_drafts(tmp_path: Path) -> None:
    done = worked(in_process("plan", write_tiny_model(tmp_path / "model", num_nextn_predict_layers=0)))
    assert "MTP0" in done.stdout and re.search(r"^nearest .*MTP[1-9]", done.stdout, re.MULTILINE | re.DOTALL)
