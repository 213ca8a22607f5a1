"""`glm5-ascend accept`: its steps, what it keeps, its reports; all of it for real on a CPU (`long`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.deploy.acceptance.journal import FAILED, NOT_RUN, OK, AcceptanceJournal, StepResult
from glm5_ascend.deploy.acceptance.run import check_profile, run
from glm5_ascend.deploy.acceptance.steps import Accepting, AcceptStep, StepOutcome
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.errors import CheckFailedError, ConfigError
from tests.serve.support.chat import API_KEY
from tests.serve.support.fault_proxy import FaultProxy, spoiled
from tests.support.command import assert_one_clear_line, glm5_ascend

LOAD = "in=32,out=8,concurrency=1,requests=2"
ABOUT = {"checkpoint": "somewhere", "sizes": (1, 2)}


def step(name: str, calls: list[str], error: BaseException | None = None, server: bool = False) -> AcceptStep:
    def take(setting: Accepting) -> StepOutcome:
        calls.append(name)
        if error is not None:
            raise error
        return StepOutcome(OK, "good", {"n": 1})

    return AcceptStep(name, take, f"send {name}", npu=False, server=server)


def setting(folder: Path, **options: Any) -> Accepting:
    return Accepting(folder / "checkpoint", load("cpu"), folder, "http://127.0.0.1:9", **options)


def results(folder: Path, *steps: AcceptStep) -> dict[str, StepResult]:
    journal = AcceptanceJournal(folder, ABOUT)
    outcome = run(setting(folder), steps, journal, lambda result: None)
    return {result.name: result for result in outcome}


def test_what_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    calls: list[str] = []
    broken = step("first", calls, CheckFailedError("it is bad", "mend it"))
    odd = step("odd", calls, RuntimeError("device-side assert"))
    outcome = results(tmp_path, broken, odd, step("second", calls), step("third", calls, server=True))
    assert calls == ["first", "odd", "second"]
    assert (outcome["first"].status, outcome["first"].verdict, outcome["first"].send) == (
        FAILED,
        "it is bad",
        "send first",
    )
    assert (
        outcome["first"].figures == {"fix": "mend it"} and outcome["odd"].verdict == "RuntimeError: device-side assert"
    )
    assert outcome["serve"].status == FAILED and "no answer" in outcome["serve"].verdict and outcome["serve"].send
    assert (outcome["third"].status, outcome["second"].status) == (NOT_RUN, OK)


def test_the_same_command_goes_on(tmp_path: Path) -> None:
    """After Ctrl-C in the second step the first is not repeated; what failed is."""
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        results(tmp_path, step("first", calls), step("second", calls, KeyboardInterrupt()))
    results(tmp_path, step("first", calls), step("second", calls, CheckFailedError("no")))
    results(tmp_path, step("first", calls), step("second", calls))
    results(tmp_path, step("first", calls), step("second", calls))
    assert calls == ["first", "second", "second", "second"]
    journal = AcceptanceJournal(tmp_path, {**ABOUT, "checkpoint": "elsewhere"})
    assert journal.results == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"about": {}, "steps": 3}', "{" * 5000])
def test_a_damaged_journal_is_begun_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "accept.json").write_text(text)
    assert AcceptanceJournal(tmp_path, ABOUT).results == {}


def test_profiles_of_several_servers_need_an_address(tmp_path: Path) -> None:
    several = Accepting(tmp_path, load("a3-pd"), tmp_path)
    with pytest.raises(ConfigError, match="several servers"):
        check_profile(several)
    several.url = "http://10.0.0.7:8000"
    check_profile(several)


def test_without_an_npu(rotated_checkpoint: Path, tmp_path: Path) -> None:
    """Refused; with --simulate-npu what needs one is not run, and nothing is called accepted."""
    arguments = (
        "accept",
        rotated_checkpoint,
        "--profile",
        "a3-single-w4a8",
        "--out",
        tmp_path / "out",
        "--workload",
        LOAD,
    )
    assert_one_clear_line(glm5_ascend(*arguments), 3, "needs an Atlas")
    done = glm5_ascend(*arguments, "--simulate-npu", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    statuses = {entry["name"]: entry["status"] for entry in report["steps"]}
    assert list(statuses) == ["doctor", "parity", "plan", "serve", "smoke", "eval", "load", "watch"]
    assert {name for name, status in statuses.items() if status == "not run"} == set(statuses) - {"doctor", "plan"}
    assert (report["ok"], report["accepted"]) == (True, False) and report["verdict"].startswith("not accepted")
    written = json.loads((tmp_path / "out/accept.json").read_text())
    assert written["verdict"] == report["verdict"] and written["versions"]["glm5-ascend"]
    assert all(len(file["sha256"]) == 64 for file in written["about"]["files"])
    page = (tmp_path / "out/accept.html").read_text()
    assert "not run" in page and written["about"]["files"][0]["sha256"] in page
    (plan,) = (entry for entry in written["steps"] if entry["name"] == "plan")
    assert "no plan" in plan["verdict"]  # this small model cannot be cut over 16 dies


@pytest.mark.server
@pytest.mark.long
def test_all_of_it_on_a_cpu(rotated_checkpoint: Path, tmp_path: Path) -> None:
    """The shipped model in W4A8: every step for real. The same command afterwards repeats none of them."""
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
    page = (tmp_path / "accept.html").read_text()
    assert "<h2>Steps</h2>" in page and "Where to report" not in page
    again = json.loads(glm5_ascend(*arguments, VLLM_CPU_KVCACHE_SPACE="1").stdout)
    assert [entry["began"] for entry in again["steps"]] == [entry["began"] for entry in report["steps"]]


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
    page = (tmp_path / "accept.html").read_text()
    assert "Where to report" in page and API_KEY not in page + (tmp_path / "accept.json").read_text()
