"""`glm5-ascend accept`: its steps and its report; all of it for real on a CPU (`long`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glm5_ascend.deploy.acceptance.measurements import run_load_test
from glm5_ascend.deploy.acceptance.run import acceptance_of, run
from glm5_ascend.deploy.acceptance.steps import FAILED, NOT_RUN, OK, WARNING, Acceptance, AcceptStep, StepResult
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.errors import CheckFailedError, ConfigError
from tests.serve.support.chat import API_KEY
from tests.serve.support.fault_proxy import FaultProxy, spoiled
from tests.support.command import assert_one_clear_line, glm5_ascend

LOAD = "in=32,out=8,concurrency=1,requests=2"


def step(name: str, calls: list[str], error: BaseException | None = None, server: bool = False) -> AcceptStep:
    def take(acceptance: Acceptance) -> StepResult:
        calls.append(name)
        if error is not None:
            raise error
        return StepResult(OK, "good", {"n": 1})

    return AcceptStep(name, take, f"send {name}", npu=False, server=server)


def test_a_failed_step_does_not_end_the_others(tmp_path: Path) -> None:
    calls: list[str] = []
    broken = step("first", calls, CheckFailedError("it is bad", "repair it"))
    odd = step("odd", calls, RuntimeError("device-side assert"))
    steps = [broken, odd, step("second", calls), step("third", calls, server=True)]
    acceptance = Acceptance(tmp_path / "checkpoint", load("cpu"), tmp_path, "http://127.0.0.1:9")
    results = {result.name: result for result in run(steps, acceptance)}
    assert calls == ["first", "odd", "second"]
    first, serve = results["first"], results["serve"]
    assert (first.status, first.verdict, first.send) == (FAILED, "it is bad", "send first")
    assert first.figures == {"fix": "repair it"} and results["odd"].verdict == "RuntimeError: device-side assert"
    assert serve.status == FAILED and "no answer" in serve.verdict and serve.send
    assert (results["third"].status, results["second"].status) == (NOT_RUN, OK)


def test_profiles_of_several_servers_need_an_address(tiny_w4a8: Path) -> None:
    with pytest.raises(ConfigError, match="several servers"):
        acceptance_of(AcceptOptions(tiny_w4a8, profile="a3-pd"), "")
    acceptance_of(AcceptOptions(tiny_w4a8, profile="a3-pd", url="http://10.0.0.7:8000"), "")


def test_the_result_of_another_tool_is_the_load(tiny_w4a8: Path, tmp_path: Path) -> None:
    """Its figures are compared; for this small model there is no plan on 16 dies."""
    result = {
        "completed": 8, "total_input_tokens": 800, "total_output_tokens": 80, "max_concurrency": 2,
        "output_throughput": 12.5, "mean_ttft_ms": 40.0,
    }  # fmt: skip
    line = json.dumps(result) + "\n"
    (tmp_path / "run.jsonl").write_text(line)
    options = AcceptOptions(
        tiny_w4a8, profile="a3-single-w4a8", url="http://10.0.0.7:8000", results=tmp_path / "run.jsonl"
    )
    acceptance = acceptance_of(options, "")
    assert acceptance.load == "in=100,out=10,requests=8,concurrency=2"
    step = run_load_test(acceptance)
    assert step.figures == {"measured": {"output_tokens_per_s": 12.5, "ttft_ms": 40.0}}
    assert step.status == WARNING and step.verdict.startswith("12.5 tokens/s; no plan: ")
    (tmp_path / "run.jsonl").write_text(line.replace("12.5", "99") + line)
    assert run_load_test(acceptance_of(options, "")).verdict.startswith(f"run 2 of 2 in {options.results}: 12.5 ")
    with pytest.raises(ConfigError, match="--workload and --results"):
        acceptance_of(replace(options, workload=LOAD), "")


def test_without_an_npu(rotated_checkpoint: Path, tmp_path: Path) -> None:
    """Refused; with --simulate-npu what needs one is not run, and nothing is called accepted."""
    profile = ("accept", rotated_checkpoint, "--profile", "a3-single-w4a8")
    arguments = (*profile, "--out", tmp_path / "out", "--workload", LOAD)
    assert_one_clear_line(glm5_ascend(*arguments), 3, "needs an Atlas")
    done = glm5_ascend(*arguments, "--simulate-npu", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    statuses = {entry["name"]: entry["status"] for entry in report["steps"]}
    assert list(statuses) == ["doctor", "parity", "plan", "serve", "smoke", "eval", "load", "watch"]
    assert {name for name, status in statuses.items() if status == "not run"} == set(statuses) - {"doctor", "plan"}
    assert (report["ok"], report["accepted"]) == (True, False) and report["verdict"].startswith("not accepted")
    written = json.loads((tmp_path / "out/accept.json").read_text())
    assert written == report and written["versions"]["glm5-ascend"]
    assert all(len(file["sha256"]) == 64 for file in written["about"]["files"])
    (plan,) = (entry for entry in written["steps"] if entry["name"] == "plan")
    assert "no plan" in plan["verdict"]  # this small model cannot be cut over 16 dies


@pytest.mark.server
@pytest.mark.long
def test_all_of_it_on_a_cpu(rotated_checkpoint: Path, tmp_path: Path) -> None:
    """The shipped model in W4A8: every step for real."""
    arguments = ("accept", rotated_checkpoint, "--profile", "cpu", "--out", tmp_path, "--minutes", "0.5", "--json")
    done = glm5_ascend(*arguments, VLLM_CPU_KVCACHE_SPACE="1")
    report = json.loads(done.stdout)
    for entry in report["steps"]:
        print(f"{entry['name']:<9} {entry['status']:<8} {entry['seconds']:7.1f} s  {entry['verdict']}")
    assert (done.returncode, report["accepted"]) == (0, True), done.stdout[-3000:] + done.stderr
    figures = {entry["name"]: entry["figures"] for entry in report["steps"]}
    assert figures["parity"]["implementations"]["cpu"]["results"] > 100
    assert 0 < figures["eval"]["kl_mean"] < 0.01
    measured = figures["load"]["measured"]
    assert measured["failed"] == 0 and measured["output_tokens_per_s"] > 0 and measured["per_step"] > 1
    if "fix" in figures["hardware"]:  # a machine too busy to be measured is accepted all the same
        assert "predicted" not in figures["load"] and "this machine was not measured" in done.stdout
    else:
        predicted = figures["load"]["predicted"]
        assert predicted["output_tokens_per_s"]["low"] < predicted["output_tokens_per_s"]["high"]
    assert figures["watch"]["polls"] == 3 and figures["watch"]["canaries"] == 6


@pytest.mark.server
@pytest.mark.long
def test_garbage_is_not_accepted(server: str, rotated_checkpoint: Path, tmp_path: Path) -> None:
    """A server elsewhere whose answers are replaced: smoke and watch say so, and what to send whom."""
    with spoiled(FaultProxy(server, "noise")) as url:
        done = glm5_ascend(
            "accept", rotated_checkpoint, "--profile", "a3-single-w4a8", "--url", url,
            "--out", tmp_path, "--minutes", "0", "--workload", LOAD, "--json", OPENAI_API_KEY=API_KEY,
        )  # fmt: skip
    report = json.loads(done.stdout)
    statuses = {entry["name"]: entry["status"] for entry in report["steps"]}
    assert (done.returncode, report["ok"], report["accepted"]) == (1, False, False), report["verdict"]
    assert statuses["smoke"] == statuses["watch"] == "failed" and statuses["serve"] == "ok"
    assert statuses["parity"] == "failed"  # there is no NPU: said by the step, not by an exception
    assert all(entry["send"] for entry in report["steps"] if entry["status"] == "failed")
    assert API_KEY not in (tmp_path / "accept.json").read_text()
