"""`glm5-ascend plan` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from glm5_ascend.cli import run
from glm5_ascend.cli.plan_options import CacheOption
from glm5_ascend.errors import PlanError
from glm5_ascend.files.resources import data_dir
from glm5_ascend.plan import plan as make_plan
from glm5_ascend.plan import text
from glm5_ascend.plan.model import CACHES
from glm5_ascend.plan.result import PlanCommands
from tests.support.command import ROOT, glm5_ascend

NUMBERS = (
    "weight_bytes_total", "weight_bytes_per_die", "kv_bytes_per_token", "kv_budget_bytes_per_die", "max_context_tokens",
    "max_concurrency", "tpot_ms", "ttft_ms", "output_tokens_per_s",
)  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert run(["plan", *map(str, arguments), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_every_number_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--model", "glm-5.2", "--quant", "w8a8", "--nodes", 2, "--price", 100)
    for name in (*NUMBERS, "cost_per_million_output_tokens"):
        number = found[name]
        assert isinstance(number, dict)
        assert number["low"] <= number["value"] <= number["high"], name
        assert number["basis"] in ("measured", "derived", "fitted", "guessed")
    assert found["weight_bytes_total"]["high"] == 773_778_904_680  # type: ignore[index]
    assert {"tp", "dp", "ep", "dcp", "pd"} <= set(found["layout"])  # type: ignore[call-overload]


def test_a_given_layout_is_judged_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--quant", "w4a8", "--layout", "tp=16,dp=1", "--mtp", 3)
    layout = found["layout"]
    assert isinstance(layout, dict)
    assert (layout["tp"], layout["dp"], layout["ep"], layout["dcp"], layout["pd"]) == (16, 1, 16, 1, None)
    assert found["weight_bytes_per_die"]["value"] == pytest.approx(28.0e9, rel=0.01)  # type: ignore[index]
    assert any("W4A8" in reason for reason in found["extrapolated"])  # type: ignore[attr-defined]


def test_no_given_layout_beats_the_found_one(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ("--nodes", 2, "--quant", "w4a8", "--workload", "in=3500,out=1500,concurrency=64", "--mtp", 3)
    best = plan(capsys, *workload)["output_tokens_per_s"]["value"]  # type: ignore[index]
    for layout in ("tp=16,dp=2", "tp=4,dp=8", "tp=1,dp=32", "tp=8,dp=1,prefill_tp=8,prefill_dp=3"):
        try_one = ["plan", *map(str, workload), "--layout", layout, "--json"]
        if run(try_one) == 0:
            other = json.loads(capsys.readouterr().out)
            assert other["output_tokens_per_s"]["value"] <= 1.001 * best, layout


def test_a_limit_on_latency_is_kept_or_its_miss_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--nodes", 2, "--quant", "w8a8", "--workload", "in=3500,out=1500,concurrency=64")
    kept = plan(capsys, *common, "--slo", "tpot=60ms")
    assert kept["slo_met"] and kept["tpot_ms"]["value"] <= 60  # type: ignore[index]
    missed = plan(capsys, *common, "--slo", "tpot=1ms")
    assert missed["slo_met"] is False
    assert run(["plan", *map(str, common), "--slo", "tpot=1ms"]) == 0
    assert "SLO       not met" in capsys.readouterr().out


def test_a_checkpoint_directory(capsys: pytest.CaptureFixture[str], tiny_w4a8: Path) -> None:
    found = plan(capsys, tiny_w4a8, "--workload", "in=64,out=32,concurrency=2", "--mtp", 1)
    stored = sum(path.stat().st_size for path in tiny_w4a8.glob("*.safetensors"))
    assert found["weight_bytes_total"]["value"] == pytest.approx(stored, rel=0.1)  # type: ignore[index]
    assert found["weight_bytes_total"]["basis"] == "measured"  # type: ignore[index]
    layout = found["layout"]
    assert isinstance(layout, dict)
    assert layout["ep"] * layout["replicas"] <= 16 and layout["ep"] <= 4, "a model of 4 experts: several on a node"


def test_a_plan_by_name_needs_no_torch() -> None:
    code = "import sys; from glm5_ascend.cli import run; run(['plan']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_answer_of_one_token_has_no_time_between_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--workload", "in=3500,out=1,concurrency=4", "--mtp", 0, "--tails", "--layout", "tp=16")
    assert found["tpot_ms"]["value"] == 0 and found["ttft_ms"]["value"] > 0  # type: ignore[index]


def test_lower_acceptance_is_slower_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--layout", "tp=16", "--mtp", 3, "--tails", "--workload", "in=3500,out=300,concurrency=1")
    healthy, poor = plan(capsys, *common), plan(capsys, *common, "--acceptance", 1.5)
    for found in (healthy, poor):
        assert found["simulated"]["tpot_p50"] == pytest.approx(  # type: ignore[index]
            found["tpot_ms"]["value"] / 1e3,
            rel=0.15,  # type: ignore[index]
        )
    ratio = poor["tpot_ms"]["value"] / healthy["tpot_ms"]["value"]  # type: ignore[index]
    assert ratio == pytest.approx(3.157 / 1.5, rel=0.05)


def test_a_short_run_prints_less_than_one_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The public 4 x A3 PD run: 1920 requests at 6.5 per second; a CI baseline of 8,235 tokens/s."""
    common = ("--model", "glm-5.1", "--quant", "w8a8c8", "--cache", "none", "--index-cache", "--nodes", 4, "--mtp", 3,
              "--layout", "tp=1,dp=32,prefill_tp=8,prefill_dp=4", "--utilization", 0.92)  # fmt: skip
    load = "in=3500,out=1500,concurrency=480,rate=6.5"
    steady = plan(capsys, *common, "--workload", load)["output_tokens_per_s"]
    short = plan(capsys, *common, "--workload", load + ",requests=1920")["output_tokens_per_s"]
    assert isinstance(steady, dict) and isinstance(short, dict)
    assert short["low"] <= 8235 <= short["high"]
    assert short["value"] < 0.95 * steady["value"]


def test_tails_are_simulated_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--workload", "in=3500,out=300,concurrency=16,rate=0.5", "--tails", "--layout", "tp=16")
    tails = found["simulated"]
    assert isinstance(tails, dict)
    assert tails["tpot_p50"] <= tails["tpot_p99"] and tails["ttft_p50"] <= tails["ttft_p99"]


def test_tails_of_a_short_run_have_its_queue(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight at once and one rank: the last one waits for seven prefills, the middle ones for three or four."""
    load = "in=3500,out=1,concurrency=8,requests=8"
    found = plan(capsys, "--workload", load, "--tails", "--layout", "tp=16", "--mtp", 0, "--seqs", 8)
    tails, mean = found["simulated"], found["ttft_ms"]["value"] / 1e3  # type: ignore[index]
    assert isinstance(tails, dict) and any("--tails" in note for note in found["notes"])  # type: ignore[union-attr]
    # Percentiles of eight waits of 1 to 8 prefills. The simulator's prefill is a plane through what is a maximum of the
    # host's time and the device's, and these two are near each other here: its size is right within 10 %.
    assert tails["ttft_p99"] / tails["ttft_p50"] == pytest.approx(7.93 / 4.5, rel=0.01)
    assert tails["ttft_p50"] == pytest.approx(mean, rel=0.1)


def test_a_cache_is_one_of_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert {option.value for option in CacheOption} == set(CACHES)
    assert run(["plan", "--cache", "fp4"]) == 2
    assert "'fp4' is not one of 'none', 'li', 'li+sfa'" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(PlanError, match="--cache fp4") as caught:
        make_plan(cache="fp4")
    assert "known: none, li, li+sfa" in caught.value.tip
    assert plan(capsys, "--cache", "li+sfa")["cache"] == "li+sfa"


@pytest.mark.parametrize("width", [80, 120])
def test_help_is_whole_and_grouped(width: int) -> None:
    done = glm5_ascend("plan", "--help", COLUMNS=str(width), TERM="dumb")
    words = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0 and "…" not in words
    for panel in ("Model", "Machines", "Load and limits", "Engine", "Answer", "Measure this CPU"):
        assert f"─ {panel} ─" in done.stdout
    for key in ("in=", "out=", "concurrency=", "prefix_hit=", "rate=", "requests=", "prefill_tp=", "tp=16,dp=2"):
        assert key in words
    examples = [line for line in done.stdout.splitlines() if line.strip().startswith("glm5-ascend plan")]
    assert len(examples) == 2


def test_the_example_of_the_help_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *["--quant", "w4a8", "--nodes", "4", "--slo", "tpot=50ms,ttft=2s"])
    assert found["slo_met"]
    assert plan(capsys, "--layout", "tp=16, dp=1", "--workload", "in=3500, out=1500")["ok"]


def test_own_hardware_file_and_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = yaml.safe_load((data_dir("plan/data") / "hardware" / "a3.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw | {"name": "mine", "price_per_node_hour": 36.0}), encoding="utf-8")
    found = plan(capsys, "--hardware", path, "--layout", "tp=16")
    speed = found["output_tokens_per_s"]["value"]  # type: ignore[index]
    cost = found["cost_per_million_output_tokens"]["value"]  # type: ignore[index]
    assert cost == pytest.approx(36.0 / 3600 / speed * 1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "profile"),
    [
        (("--quant", "w4a8", "--layout", "tp=16,dp=1"), "a3-single-w4a8"),
        (
            (
                "--quant",
                "w4a8",
                "--hardware",
                "a2",
                "--layout",
                "tp=8,dp=1",
                "--workload",
                "in=3500,out=1500,concurrency=8",
            ),
            "a2-single-w4a8",
        ),
        # more requests, tokens or positions than the profile allows, or another model
        (("--quant", "w4a8", "--hardware", "a2", "--layout", "tp=8,dp=1"), None),
        (("--quant", "w4a8", "--layout", "tp=16,dp=1", "--workload", "in=3500,out=1500,concurrency=64"), None),
        (("--quant", "w8a8", "--layout", "tp=16,dp=1", "--workload", "in=41000,out=100,concurrency=1"), None),
        (("--model", "glm-5.2", "--quant", "w4a8", "--layout", "tp=16,dp=1"), None),
        (("--quant", "w8a8", "--nodes", 2, "--layout", "tp=16,dp=2"), "a3-2node"),
        (("--quant", "w8a8", "--nodes", 4, "--layout", "tp=4,dp=8,prefill_tp=8,prefill_dp=4"), "a3-pd"),
        (("--quant", "w4a8", "--layout", "tp=8,dp=2"), None),
        (("--quant", "w4a8", "--nodes", 2, "--layout", "tp=16,dp=2"), None),
    ],
)
def test_the_profile_with_the_layout_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], profile: str | None
) -> None:
    found = plan(capsys, *arguments)
    assert found["profile"] == profile
    assert str(found["command_lines"][0]).startswith(f"profile: {profile or 'none'}")  # type: ignore[index]


def test_scale_with_a_price_has_costs(tmp_path: Path) -> None:
    """A million tokens cost price x nodes / 3600 / (tokens per second) x 1e6."""
    script = ROOT / "benchmarks" / "report_plan_scale.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--price", "36", "--nodes", "1", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    header, _, *rows = (line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|"))
    assert rows
    for row in (dict(zip(header, row, strict=True)) for row in rows):
        cost = 36 * int(row["nodes"]) / 3600 / float(row["tokens_per_s"]) * 1e6
        assert float(row["cost_per_million"]) == pytest.approx(cost, rel=1e-3)


def test_the_report_says_the_same_at_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut: the words are the same. A command to copy stays on its line."""
    found = make_plan(model="glm-5.1", quant="w8a8", nodes=4, slo="tpot=1ms", price=3.0, tails=True)
    commands = PlanCommands("p", ("vllm serve" + 30 * " --flag",))
    texts = [text.lines(found.plan, found.simulated, width, commands) for width in (40, 80, 300)]
    words = [" ".join(lines).split() for lines in texts]
    assert words[0] == words[1] == words[2]
    assert any(len(line) > 80 for line in texts[2]) and max(map(len, texts[1][:30])) <= 80
    for lines in texts:
        assert set(commands.lines) <= set(lines)
    assert replace(found, commands=commands).lines() == texts[1] and not any("\x1b" in line for line in texts[1])


def test_numbers_of_the_next_best_layouts_stand_in_columns() -> None:
    lines = make_plan(nodes=4).lines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next best layouts"))
    rows = lines[start : start + 5]
    assert len({len(row) for row in rows}) == 1 and all(row.split()[-1].replace(",", "").isdigit() for row in rows[1:])
