"""`plan --calibrate`: a user's runs move the constants, and a machine file keeps them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.baselines import cases
from glm5_ascend.plan.calibrate import calibrate
from glm5_ascend.plan.efficiency import fitted_efficiencies
from tests.support.command import assert_one_clear_line, in_process

COLUMNS = ("model", "quant", "nodes", "tp", "dp", "prompt", "output", "concurrency", "requests", "out_tok_s")
SETUP = {"model": "glm-5.1", "quant": "w8a8", "nodes": 2, "tp": 4, "dp": 8}


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """Runs on a machine that does a fifth less than the public one."""
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for case in (c for c in cases() if c.row.id in ("5.1-2n-3.5k-50", "5.1-2n-3.5k-20", "5.1-2n-3.5k-20-tp4")):
            row = case.row.model_dump() | {"out_tok_s": 0.8 * case.predicted(fitted_efficiencies())["tok_s"]}
            writer.writerow([row[name] for name in COLUMNS])
    return path


def test_runs_move_the_constants_and_the_file_keeps_them(
    slower: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = calibrate(slower, "a3", {})
    before, after = (
        [abs(value) for errors in cases_errors for value in errors.values()]
        for cases_errors in (calibration.errors_before, calibration.errors_after)
    )
    assert max(after) < 0.6 * max(before)
    machine = tmp_path / "mine.yaml"
    assert run(["plan", "--calibrate", str(slower), "--out", str(machine)]) == 0
    text = capsys.readouterr().out
    assert "row 1: measured" in text and "graph_seconds" in text and "->" in text and str(machine) in text
    load = "in=3500,out=1500,concurrency=64"
    slow, public = (
        plan(model="glm-5.1", quant="w8a8", nodes=2, hardware=name, layout="tp=4,dp=8", mtp=3, workload=load).plan
        for name in (str(machine), "a3")
    )
    assert slow.numbers["output_tokens_per_s"].value < public.numbers["output_tokens_per_s"].value


def test_the_json_of_benchmarks_is_read(tmp_path: Path) -> None:
    vllm, aisbench = tmp_path / "vllm.json", tmp_path / "ais.json"
    vllm.write_text(json.dumps({
        "completed": 256, "total_input_tokens": 256 * 3500, "total_output_tokens": 256 * 1500, "max_concurrency": 64,
        "request_rate": "inf", "output_throughput": 1200.0, "mean_ttft_ms": 2000.0, "mean_tpot_ms": 50.0,
    }))  # fmt: skip
    aisbench.write_text(json.dumps({
        "Total Requests": {"total": "256"}, "Max Concurrency": {"total": 64},
        "Total Input Tokens": {"total": 256 * 3500},
        "Total Generated Tokens": {"total": 256 * 1500}, "Output Token Throughput": {"total": "1200.0 token/s"},
    }))  # fmt: skip
    rows = [calibrate(path, "a3", SETUP).cases[0].row for path in (vllm, aisbench)]
    for row in rows:
        assert (row.prompt, row.output, row.concurrency, row.requests, row.out_tok_s) == (3500, 1500, 64, 256, 1200.0)
    assert rows[0].ttft_ms == 2000.0 and rows[0].rate is None and rows[1].ttft_ms is None


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.csv", "model,quant\nglm-5,w8a8\n", "row 1"),
        ("a.csv", "", "no rows"),
        ("a.json", "[1]", "not one object"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "{}", "not of vllm bench"),
    ],
)
def test_a_file_that_says_too_little_is_one_line(name: str, text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlanError, match=word):
        calibrate(path, "a3", SETUP)


@pytest.mark.parametrize("key", ["completed", "total_input_tokens", "total_output_tokens"])
@pytest.mark.parametrize("value", [0, -3, None, True])
def test_a_run_in_which_nothing_ended_is_refused(key: str, value: object, tmp_path: Path) -> None:
    """Prompts of one token would be taken for measured."""
    run = {"completed": 10, "total_input_tokens": 10000, "total_output_tokens": 5000, "output_throughput": 100.0}
    (tmp_path / "run.json").write_text(json.dumps(run | {key: value}))
    done = in_process("plan", "--calibrate", tmp_path / "run.json", "--model", "glm-5", "--layout", "tp=16")
    assert_one_clear_line(done, 2, f"{key} is {value}, not above 0")
