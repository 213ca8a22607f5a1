"""`glm5-ascend watch`: a proxy plants faults into a good server's answers; a healthy server has no finding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5_ascend.errors import CheckFailedError
from glm5_ascend.serve.watching.api import WatchReport, watch
from glm5_ascend.serve.watching.canaries import Canary, learn_canaries, read_canaries, repeats
from glm5_ascend.serve.watching.poll import SILENT, WatchPoll
from tests.serve.support.chat import API_KEY
from tests.serve.support.fault_proxy import FAULTS, FaultProxy, spoiled
from tests.serve.support.stub import stub_server, wrong_sums
from tests.support.command import assert_one_clear_line, glm5_ascend, in_process

BAD = [
    "", "{}", '{"canaries": []}', '{"canaries": [3]}', '{"canaries": [{"question": ""}]}',
    '{"canaries": [{"question": "a", "contains": 85}]}', '{"canaries": [{"question": "a", "prompt_ids": "12"}]}',
    '{"canaries": [{"question": "a", "logprobs": [0]}]}',
    '{"canaries": [{"question": "a", "token_ids": [1], "logprobs": [1e9]}]}',
]  # fmt: skip
#: Polls of a minute.
MINUTE = 6
#: Only to end a test that hangs.
ANSWER_S = 600.0


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    with stub_server() as url:
        yield url


@pytest.fixture(scope="module")
def canaries(stub: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded from the stub."""
    file = tmp_path_factory.mktemp("watch") / "canaries.json"
    learn_canaries(stub, file)
    return file


def polled(url: str, canaries: Path | None, polls: int) -> WatchReport:
    return watch(url, canaries=canaries, polls=polls, interval=0, timeout=ANSWER_S, key=API_KEY)


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_bad_file_is_one_clear_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "canaries.json"
    file.write_text(text)
    assert_one_clear_line(in_process("watch", "http://127.0.0.1:9", "--once", "--canaries", file), 2, "canaries.json")


def is_wrong(canary: Canary, text: str) -> bool:
    return not canary.is_answered_by(text)


def test_wrong_and_repeated_answers() -> None:
    canary = Canary(question="a", contains="85")
    assert is_wrong(canary, "47 + 38 = 84.") and is_wrong(canary, "") and not is_wrong(canary, "85")
    assert is_wrong(canary, "85\ufffd.") and not is_wrong(canary, "85\ufffd")  # max_tokens may cut the last one
    canary = Canary(question="a", answer="I am a small GLM-5 made to test glm5-ascend.")
    assert is_wrong(canary, "kq vxz, . wqe pl") and not is_wrong(canary, "I am a small GLM-5 made to test  it.")
    assert not is_wrong(Canary(question="a"), "whatever") and is_wrong(Canary(question="a"), " ")
    assert repeats("the answer to this is that " * 6) and repeats("!" * 16)
    assert not any(map(repeats, ("", "A list:\n- one\n- two\n- three\n- four\n- five\n- six", "no no no")))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed_within_a_minute_of_polls(fault: str, stub: str, canaries: Path) -> None:
    """Two healthy polls, then the fault; a minute has six polls. It is a finding as long as it lasts."""
    proxy = FaultProxy(stub)
    noticed: list[int] = []
    with spoiled(proxy) as url:

        def after(polls: int, poll: WatchPoll) -> None:
            if polls == 2:
                assert not poll.findings, poll
                proxy.fault = fault
            if poll.findings:
                noticed.append(polls)

        report = watch(url, canaries=canaries, polls=2 + MINUTE, interval=0, timeout=ANSWER_S, on_poll=after)
    assert FAULTS[fault] in report.findings and report.exit_code == 1
    assert noticed == list(range(noticed[0], 3 + MINUTE))


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
    assert healthy["glm5_watch_up"] == 1
    assert 'outcome="good"} 30' in file.read_text()
    with spoiled(FaultProxy(stub, "repeats")) as url:
        done = in_process("watch", url, "--once", "--textfile", file)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("garbage: repeats (poll 1)")
    assert 'finding="repeats"} 1' in file.read_text()
    done = in_process("watch", "http://127.0.0.1:9", "--once", "--textfile", file)
    assert done.returncode == 3 and "unreachable" in done.stdout and "Traceback" not in done.stderr
    assert values()["glm5_watch_up"] == 0


@pytest.mark.parametrize("largest_id", [1023, 154_827], ids=["a small model", "GLM-5"])
def test_a_wrong_sum_is_learnt_of_a_small_model_only(largest_id: int, tmp_path: Path) -> None:
    """Its steady answer is expected then, and another one is found."""
    file = tmp_path / "canaries.json"
    with stub_server(respond=wrong_sums, largest_id=largest_id) as url:
        if largest_id > 150_000:
            with pytest.raises(CheckFailedError, match=r"is not healthy: 'What is 47 \+ 38\?' -> '47 \+"):
                learn_canaries(url, file)
            assert not file.exists()
            return
        learnt = {canary.question: canary for canary in learn_canaries(url, file).canaries}
        assert (learnt["What is 47 + 38?"].answer, learnt["What is 47 + 38?"].contains) == ("47 + 38 = 75.", "")
        assert not polled(url, file, 1).findings
    with stub_server(respond=lambda body: wrong_sums(body) | {"content": "I am Anna."}) as url:
        assert "wrong_answers" in polled(url, file, 1).findings


def test_a_silent_server_is_not_garbage(stub: str) -> None:
    """It is asked two questions only, and watched further when it answers again."""
    proxy = FaultProxy("http://127.0.0.1:9")
    with spoiled(proxy) as url:

        def back(polls: int, poll: WatchPoll) -> None:
            proxy.target = stub

        report = watch(url, polls=2, interval=0, timeout=ANSWER_S, on_poll=back)
    assert report.last.reached and report.unreachable == 1 and report.exit_code == 0
    assert report.outcomes.total() == 2 + 6 and report.outcomes[SILENT] == 2


@pytest.mark.server
def test_a_real_server(server: str, tmp_path: Path) -> None:
    """Recorded canaries have what the server knows of its tokens; it stays healthy, and noise is noticed."""
    questions, file = tmp_path / "questions.json", tmp_path / "canaries.json"
    questions.write_text('{"canaries": [{"question": "What is 47 + 38?"}, {"question": "Who are you?"}]}')
    done = glm5_ascend("watch", server, "--learn", file, "--canaries", questions, "--json", OPENAI_API_KEY=API_KEY)
    assert (done.returncode, json.loads(done.stdout)["canaries"]) == (0, 2), done.stdout + done.stderr
    recorded = read_canaries(file)
    assert all(canary.answer and len(canary.logprobs) == len(canary.token_ids) > 5 for canary in recorded.canaries)
    assert polled(server, file, 1).exit_code == 0
    with spoiled(FaultProxy(server, "noise")) as url:
        assert "wrong_answers" in polled(url, None, 1).findings
