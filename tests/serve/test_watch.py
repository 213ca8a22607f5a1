"""`glm5-ascend watch`: a proxy plants faults into a good server's answers; a healthy server has no finding."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5_ascend.serve.watching.api import WatchReport, learn_canaries, watch
from glm5_ascend.serve.watching.canaries import Canary, CanarySet, read_canaries, repeats
from glm5_ascend.serve.watching.judge import WINDOW, Judge, WatchState
from glm5_ascend.serve.watching.poll import CANARY, EMPTY, GOOD, SILENT, TOOL, WRONG, WatchPoll
from tests.serve.support.chat import API_KEY
from tests.serve.support.fault_proxy import FAULTS, FaultProxy, spoiled
from tests.serve.support.stub import stub_server
from tests.support.command import assert_one_clear_line, glm5_ascend, in_process

BAD = [
    "", "{}", '{"canaries": []}', '{"canaries": [3]}', '{"canaries": [{"question": ""}]}',
    '{"canaries": [{"question": "a", "contains": 85}]}', '{"canaries": [{"question": "a", "prompt_ids": "12"}]}',
    '{"canaries": [{"question": "a", "logprobs": [0]}]}',
    '{"canaries": [{"question": "a", "token_ids": [1], "logprobs": [1e9]}]}',
    '{"canaries": [{"question": "a", "shift": NaN}]}', '{"canaries": [{"question": "a"}], "tokens_per_step": "x"}',
]  # fmt: skip
#: Only to end a test that hangs.
ANSWER_S = 600.0


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    with stub_server() as url:
        yield url


@pytest.fixture(scope="module")
def canaries(stub: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded from the stub; one tool call per poll."""
    file = tmp_path_factory.mktemp("watch") / "canaries.json"
    recorded = learn_canaries(stub, file)
    recorded.model_copy(update={"cities": ("Oslo",)}).save(file)
    return file


def polled(url: str, canaries: Path | None, polls: int) -> WatchReport:
    return watch(url, canaries=canaries, polls=polls, interval=0, timeout=ANSWER_S, key=API_KEY)


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_bad_file_is_one_clear_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "canaries.json"
    file.write_text(text)
    assert_one_clear_line(in_process("watch", "http://127.0.0.1:9", "--once", "--canaries", file), 2, "canaries.json")


def test_read_and_save(tmp_path: Path) -> None:
    file = tmp_path / "canaries.json"
    file.write_text('{"schema_version": 1, "canaries": [{"question": "What is 47 + 38?", "contains": "85"}]}')
    assert read_canaries(file).canaries == (Canary(question="What is 47 + 38?", contains="85"),)
    canary = Canary(question="a", answer="b", prompt_ids=(1, 2), token_ids=(3,), logprobs=(-0.5,), shift=0.4)
    recorded = CanarySet(canaries=(canary,), cities=("Oslo",), tokens_per_step=2.5, model="glm-5")
    recorded.save(file)
    assert read_canaries(file) == recorded


def test_wrong_and_repeated_answers() -> None:
    canary = Canary(question="a", contains="85")
    assert canary.is_wrong("47 + 38 = 84.") and not canary.is_wrong("85")
    canary = Canary(question="a", answer="I am a small GLM-5 made to test glm5-ascend.")
    assert canary.is_wrong("kq vxz, . wqe pl") and not canary.is_wrong("I am a small GLM-5 made to test  it.")
    assert not Canary(question="a").is_wrong("whatever")
    assert repeats("the answer to this is that " * 6) and repeats("!" * 16)
    assert not any(map(repeats, ("", "A list:\n- one\n- two\n- three\n- four\n- five\n- six", "no no no")))


def poll(**counts: int) -> WatchPoll:
    """A poll with these numbers of outcomes. good, wrong, silent: canaries; called, empty: tool calls."""
    names = {"good": (CANARY, GOOD), "wrong": (CANARY, WRONG), "silent": (CANARY, SILENT)}
    names |= {"called": (TOOL, GOOD), "empty": (TOOL, EMPTY)}
    return WatchPoll(Counter({names[name]: count for name, count in counts.items()}))


def test_one_bad_answer_is_no_finding_and_three_in_a_window_are() -> None:
    judge = Judge()
    for wrong in (1, 0, 1):
        assert not judge.judge(poll(good=6 - wrong, wrong=wrong)).findings
    assert set(judge.judge(poll(good=5, wrong=1)).findings) == {"wrong_answers"}
    for _ in range(WINDOW):
        state = judge.judge(poll(good=6))
    assert not state.findings


def test_half_of_a_poll_is_a_finding_and_silence_is_none() -> None:
    assert set(Judge().judge(poll(good=2, wrong=2, called=2)).findings) == {"wrong_answers"}
    assert set(Judge().judge(poll(good=4, empty=2)).findings) == {"empty_tool_calls"}
    judge = Judge()
    assert not judge.judge(poll(good=1, silent=5)).findings
    state = judge.judge(poll(silent=6))
    assert not state.reached and not state.findings


def test_acceptance_per_engine() -> None:
    """One bad rank of sixteen is reported, although it was good in earlier polls."""
    judge = Judge(recorded=2.6)
    healthy = {f"{rank}": (100.0, 160.0) for rank in range(16)}
    for _ in range(WINDOW):
        result = poll(good=3)
        result.steps = dict(healthy)
        assert not judge.judge(result).findings
    result = poll(good=3)
    result.steps = {**healthy, "7": (100.0, 30.0)}
    assert judge.judge(result).findings == {"mtp_acceptance": "1.30 tokens per step of engine 7, 1.80 at least"}
    few = poll(good=3)
    few.steps = {"0": (20.0, 0.0)}
    assert not Judge(recorded=2.6).judge(few).findings


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed_within_a_minute_of_polls(fault: str, stub: str, canaries: Path) -> None:
    """Two healthy polls, then the fault; a minute has six polls."""
    proxy = FaultProxy(stub)
    noticed: list[int] = []
    with spoiled(proxy) as url:

        def after(number: int, state: WatchState) -> None:
            if number == 2:
                assert not state.findings, state
                proxy.fault = fault
            if state.findings:
                noticed.append(number)

        report = watch(url, canaries=canaries, polls=2 + WINDOW, interval=0, timeout=ANSWER_S, on_poll=after)
    assert FAULTS[fault] in report.findings and report.exit_code == 1
    assert noticed == list(range(noticed[0], 3 + WINDOW))  # and it stays


def test_exit_codes_and_metrics_for_cron(stub: str, canaries: Path, tmp_path: Path) -> None:
    """The text is read by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    file = tmp_path / "glm5.prom"

    def values() -> dict[str, float]:
        families = {family.name: family for family in parser.text_string_to_metric_families(file.read_text())}
        assert {s.labels["finding"] for s in families["glm5_watch_finding"].samples} >= set(FAULTS.values())
        return {name: family.samples[0].value for name, family in families.items() if family.samples}

    assert in_process("watch", stub, "--once", "--canaries", canaries, "--textfile", file).returncode == 0
    healthy = values()
    assert healthy["glm5_watch_up"] == healthy["glm5_watch_healthy"] == 1 and healthy["glm5_watch_polls"] == 2
    assert healthy["glm5_watch_mtp_tokens_per_step"] > healthy["glm5_watch_mtp_tokens_per_step_least"] > 1
    with spoiled(FaultProxy(stub, "repeats")) as url:
        done = in_process("watch", url, "--once", "--textfile", file)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("garbage: repeats (poll 1)")
    assert 'finding="repeats"} 1' in file.read_text()
    done = in_process("watch", "http://127.0.0.1:9", "--once", "--textfile", file)
    assert done.returncode == 3 and "unreachable" in done.stdout and "Traceback" not in done.stderr
    assert values()["glm5_watch_up"] == values()["glm5_watch_healthy"] == 0


def test_learning_from_a_broken_server_fails(stub: str, tmp_path: Path) -> None:
    with spoiled(FaultProxy(stub, "noise")) as url:
        done = in_process("watch", url, "--learn", tmp_path / "canaries.json")
    assert done.returncode == 1 and "not healthy" in done.stderr and not (tmp_path / "canaries.json").exists()


def test_a_silent_server_is_not_garbage(stub: str) -> None:
    """It is asked two questions only, and watched further when it answers again."""
    proxy = FaultProxy("http://127.0.0.1:9")
    with spoiled(proxy) as url:

        def back(number: int, state: WatchState) -> None:
            proxy.target = stub

        report = watch(url, polls=2, interval=0, timeout=ANSWER_S, on_poll=back)
    assert report.last.reached and report.unreachable == 1 and report.exit_code == 0
    assert report.asked == 2 + 5


@pytest.mark.server
def test_a_real_server(server: str, tmp_path: Path) -> None:
    """Recorded canaries have what the server knows of its tokens; it stays healthy, and noise is noticed."""
    questions, file = tmp_path / "questions.json", tmp_path / "canaries.json"
    questions.write_text('{"canaries": [{"question": "What is 47 + 38?"}, {"question": "Who are you?"}]}')
    done = glm5_ascend("watch", server, "--learn", file, "--canaries", questions, "--json", OPENAI_API_KEY=API_KEY)
    assert (done.returncode, json.loads(done.stdout)["canaries"]) == (0, 2), done.stdout + done.stderr
    recorded = read_canaries(file)
    assert recorded.tokens_per_step > 1.5
    assert all(canary.answer and len(canary.logprobs) == len(canary.token_ids) > 5 for canary in recorded.canaries)
    assert polled(server, file, 1).exit_code == 0
    with spoiled(FaultProxy(server, "noise")) as url:
        assert "wrong_answers" in polled(url, None, 1).findings
