"""`glm5-ascend accept`: its steps and its report; all of it for real on a CPU (`long`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.deploy.acceptance import run as acceptance_run
from glm5_ascend.deploy.acceptance.run import acceptance_of, run
from glm5_ascend.deploy.acceptance.steps import (
    FAILED,
    NOT_RUN,
    NPU,
    OK,
    SERVER,
    Acceptance,
    StepResult,
    start_server,
)
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.errors import CheckFailedError, ConfigError
from glm5_ascend.serve.client import Client
from tests.serve.support.chat import API_KEY
from tests.serve.support.fault_proxy import FaultProxy, spoiled
from tests.support.command import glm5_ascend

LOAD = "in=32,out=8,concurrency=1,requests=2"


def test_a_failed_step_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def step(name: str, need: str = "", error: Exception | None = None) -> tuple[str, object, str]:
        def take(acceptance: Acceptance) -> StepResult:
            calls.append(name)
            if error is not None:
                raise error
            return StepResult(OK, "good", {"n": 1})

        return name, take, need

    bad, odd = CheckFailedError("it is bad", "repair it"), RuntimeError("device-side assert")
    before = step("first", "", bad), step("odd", "", odd), step("second")
    monkeypatch.setattr(acceptance_run, "STEPS", (*before, ("serve", start_server, NPU), step("third", SERVER)))
    options = AcceptOptions(tmp_path / "checkpoint", profile="cpu", out=tmp_path)
    acceptance = Acceptance(options, load("cpu"), Client("http://127.0.0.1:9"))
    results = {result.name: result for result in run(acceptance)}
    assert calls == ["first", "odd", "second"]
    first, serve = results["first"], results["serve"]
    assert (first.status, first.verdict, first.figures) == (FAILED, "it is bad", {"fix": "repair it"})
    assert results["odd"].verdict == "RuntimeError: device-side assert"
    assert serve.status == FAILED and "no answer" in serve.verdict
    assert (results["third"].status, results["second"].status) == (NOT_RUN, OK)


def test_profiles_of_several_servers_need_an_address(tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_run, "on_ascend", lambda: True)
    with pytest.raises(ConfigError, match="several servers"):
        acceptance_of(AcceptOptions(tiny_w4a8, profile="a3-pd"), "")
    acceptance_of(AcceptOptions(tiny_w4a8, profile="a3-pd", url="http://10.0.0.7:8000"), "")


def test_without_an_npu(rotated_checkpoint: Path, tmp_path: Path) -> None:
    """What needs one is not run, and nothing is called accepted."""
    arguments = ("accept", rotated_checkpoint, "--profile", "a3-single-w4a8", "--workload", LOAD)
    done = glm5_ascend(*arguments, "--out", tmp_path / "out", "--json")
    assert done.returncode == 3, done.stderr + done.stdout
    report = json.loads(done.stdout)
    statuses = {entry["name"]: entry["status"] for entry in report["steps"]}
    assert list(statuses) == ["doctor", "parity", "plan", "serve", "smoke", "eval", "load", "watch"]
    assert {name for name, status in statuses.items() if status == "not run"} == set(statuses) - {"doctor", "plan"}
    assert (report["ok"], report["accepted"]) == (False, False) and report["verdict"].startswith("not accepted")
    written = json.loads((tmp_path / "out/accept.json").read_text())
    assert written == report and written["versions"]["glm5-ascend"]
    assert all(len(file["sha256"]) == 64 for file in written["about"]["files"])
    (plan,) = (entry for entry in written["steps"] if entry["name"] == "plan")
    assert plan["status"] == "warning" and plan["figures"]["fix"]  # this small model cannot be cut over 16 dies


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
    assert figures["parity"]["results"]["cpu"] > 100
    assert 0 < figures["eval"]["kl_mean"] < 0.01
    measured = figures["load"]["measured"]
    assert measured["failed"] == 0 and measured["output_tokens_per_s"] > 0
    assert figures["watch"]["polls"] == 3 and figures["watch"]["canaries"] == 6


@pytest.mark.server
@pytest.mark.long
def test_garbage_is_not_accepted(server: str, rotated_checkpoint: Path, tmp_path: Path) -> None:
    """A server elsewhere whose answers are replaced: smoke and watch say so."""
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
    assert API_KEY not in (tmp_path / "accept.json").read_text()
