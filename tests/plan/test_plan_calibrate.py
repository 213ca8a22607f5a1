"""`plan calibrate`: a user's runs move the constants, and a machine file keeps them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.evidence import calibrate, cases, errors, predictions
from glm5_ascend.plan.hardware import fitted
from tests.support.command import assert_one_clear_line, in_process

COLUMNS = ("model", "quant", "nodes", "layout", "workload", "out_tok_s")
SETUP = {"model": "glm-5.1", "quant": "w8a8", "nodes": 2, "layout": "tp=4,dp=8"}


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """Runs on a machine that does a fifth less than the public one."""
    path = tmp_path / "runs.csv"
    rows = [case for case in cases() if case.row.id in ("5.1-2n-3.5k-50", "5.1-2n-3.5k-20", "5.1-2n-3.5k-20-tp4")]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for case, prediction in zip(rows, predictions(rows, fitted().constants), strict=True):
            row = case.row.model_dump() | {"out_tok_s": 0.8 * prediction.tok_s}
            writer.writerow([row[name] for name in COLUMNS])
    return path


def test_runs_move_the_constants_and_the_file_keeps_them(
    slower: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = calibrate(slower, "a3", {})
    before, after = (
        max(abs(value) for row in errors(calibration.cases, constants) for value in row.values())
        for constants in (calibration.before, calibration.after)
    )
    assert after < 0.6 * before
    machine = tmp_path / "mine.yaml"
    assert run(["plan", "calibrate", str(slower), "--out", str(machine)]) == 0
    text = capsys.readouterr().out
    assert "row 1: tok_s measured" in text and "graph_seconds" in text and "->" in text and str(machine) in text
    assert run(["plan", "calibrate", str(slower), "--out", str(machine)]) == 2, "nothing is overwritten"
    slow, public = (
        plan(model="glm-5.1", quant="w8a8", hardware=name, layout="tp=4,dp=8", workload="in=3500,out=1500")
        for name in (str(machine), "a3")
    )
    assert slow.numbers["output_tokens_per_s"].value < public.numbers["output_tokens_per_s"].value
    assert slow.numbers["output_tokens_per_s"].basis == "measured"


VLLM = {
    "completed": 256, "total_input_tokens": 256 * 3500, "total_output_tokens": 256 * 1500, "max_concurrency": 64,
    "request_rate": "inf", "output_throughput": 1200.0, "mean_ttft_ms": 2000.0, "mean_tpot_ms": 50.0,
}  # fmt: skip
AISBENCH = {
    "Total Requests": {"total": "256"}, "Max Concurrency": {"total": 64}, "Total Input Tokens": {"total": 256 * 3500},
    "Total Generated Tokens": {"total": 256 * 1500}, "Output Token Throughput": {"total": "1200.0 token/s"},
}  # fmt: skip
EVALSCOPE = {
    "Succeed requests": 256, "Number of concurrency": 64, "Average input tokens per request": 3500.0,
    "Output token throughput (tok/s)": 1200.0, "Average output tokens per request": 1500.0,
    "Average time to first token (s)": 2.0, "Average time per output token (s)": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(("result", "ttft"), [(VLLM, 2000.0), (AISBENCH, None), (EVALSCOPE, 2000.0)])
def test_the_json_of_benchmarks_is_read(result: dict[str, object], ttft: float | None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(result))
    (case,) = calibrate(path, "a3", SETUP).cases
    load = case.workload
    assert (load.prompt, load.output, load.concurrency, load.requests, load.rate) == (3500, 1500, 64, 256, None)
    assert case.row.out_tok_s == 1200.0 and case.row.ttft_ms == ttft


def test_lines_of_sglang_are_runs(tmp_path: Path) -> None:
    """bench_serving appends a line per run; a file of one line is read the same whatever its name is."""
    lines = [json.dumps(VLLM | {"output_throughput": speed, "backend": "sglang"}) for speed in (800.0, 900.0)]
    for name, text in (
        ("runs.jsonl", "\n".join(lines) + "\n"),
        ("run.jsonl", lines[0]),
        ("run.txt", "\ufeff" + lines[0]),
    ):
        (tmp_path / name).write_text(text)
        speeds = [case.row.out_tok_s for case in calibrate(tmp_path / name, "a3", SETUP).cases]
        assert speeds == [800.0, 900.0][: len(speeds)] and len(speeds) == max(1, text.count("\n"))


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.jsonl", json.dumps(VLLM) + "\n{", "line 2: not valid JSON"),
        ("a.jsonl", json.dumps(VLLM) + "\n{}", "line 2: not a benchmark's result"),
        ("a.jsonl", "", "no rows"),
        ("a.csv", "model,quant\nglm-5,w8a8\n", "row 1"),
        ("a.csv", "", "no rows"),
        ("a.json", "[1]", "not one object"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "{}", "not a benchmark's result"),
    ],
)
def test_a_file_that_says_too_little_is_one_line(name: str, text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlanError, match=word):
        calibrate(path, "a3", SETUP)


@pytest.mark.parametrize("key", ["completed", "total_input_tokens", "total_output_tokens"])
@pytest.mark.parametrize("value", [0, -3, True])
def test_a_run_in_which_nothing_ended_is_refused(key: str, value: object, tmp_path: Path) -> None:
    """Prompts of one token would be taken for measured."""
    (tmp_path / "run.json").write_text(json.dumps(VLLM | {key: value}))
    done = in_process("plan", "calibrate", tmp_path / "run.json", "--model", "glm-5", "--layout", "tp=16")
    assert_one_clear_line(done, 2, f"{key} is {value}, not above 0")
