"""`glm5-ascend watch` on the real server: a proxy plants faults, which are found; a healthy server has no finding."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from glm5_ascend.serve.watching.api import WatchReport, watch
from glm5_ascend.serve.watching.canaries import read_canaries
from glm5_ascend.serve.watching.judge import WINDOW, WatchState
from tests.serve.support.chat import API_KEY
from tests.serve.support.fault_proxy import FAULTS, FaultProxy, spoiled
from tests.support.command import glm5_ascend

pytestmark = pytest.mark.server
#: Only to end a test that hangs.
ANSWER_S = 600.0


@pytest.fixture(scope="module")
def canaries(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded from the healthy server by the command."""
    file = tmp_path_factory.mktemp("watch") / "canaries.json"
    done = glm5_ascend("watch", server, "--learn", file, "--json", OPENAI_API_KEY=API_KEY)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["canaries"]) == (0, True, 6), done.stdout + done.stderr
    return file


@pytest.fixture(scope="module")
def few(canaries: Path) -> Path:
    """Two of them and one tool call: a poll takes a second."""
    value = json.loads(canaries.read_text())
    file = canaries.with_name("few.json")
    file.write_text(json.dumps({**value, "canaries": value["canaries"][:2], "cities": value["cities"][:1]}))
    return file


def polled(url: str, canaries: Path | None, polls: int) -> WatchReport:
    return watch(url, canaries=canaries, polls=polls, interval=0, timeout=ANSWER_S, key=API_KEY)


def test_recorded_canaries(canaries: Path) -> None:
    recorded = read_canaries(canaries)
    assert recorded.tokens_per_step > 1.5
    for canary in recorded.canaries:
        assert canary.answer and len(canary.logprobs) == len(canary.token_ids) > 5
    assert json.loads(canaries.read_text())["schema_version"] == 1


QUICK = ("repeats", "acceptance decays")


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault in QUICK else pytest.mark.long) for fault in FAULTS]
)
def test_a_fault_is_noticed_within_a_minute_of_polls(fault: str, server: str, few: Path) -> None:
    """Two healthy polls, then the fault; a minute has six polls. What shows at once need not be asked as often."""
    proxy, polls = FaultProxy(server), 4 if fault == "repeats" else 2 + WINDOW
    noticed: list[int] = []
    with spoiled(proxy) as url:

        def after(number: int, state: WatchState) -> None:
            if number == 2:
                assert not state.findings, state
                proxy.fault = fault
            if state.findings:
                noticed.append(number)

        report = watch(url, canaries=few, polls=polls, interval=0, timeout=ANSWER_S, key=API_KEY, on_poll=after)
    print(f"{fault}: {report.verdict}")
    assert FAULTS[fault] in report.findings and report.exit_code == 1
    assert report.findings[FAULTS[fault]][0] <= polls
    assert noticed == list(range(noticed[0], polls + 1))  # and it stays


def test_without_a_file(server: str) -> None:
    with spoiled(FaultProxy(server, "noise")) as url:
        assert "wrong_answers" in polled(url, None, 1).findings
    assert polled(server, None, 2).exit_code == 0


def test_exit_codes_for_cron(server: str, canaries: Path, tmp_path: Path) -> None:
    assert glm5_ascend("watch", server, "--once", "--canaries", canaries, OPENAI_API_KEY=API_KEY).returncode == 0
    with spoiled(FaultProxy(server, "repeats")) as url:
        done = glm5_ascend("watch", url, "--once", "--textfile", tmp_path / "glm5.prom", OPENAI_API_KEY=API_KEY)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("garbage: repeats (poll 1)")
    assert 'finding="repeats"} 1' in (tmp_path / "glm5.prom").read_text()
    done = glm5_ascend("watch", "http://127.0.0.1:9", "--once", "--textfile", tmp_path / "glm5.prom")
    assert done.returncode == 3 and "unreachable" in done.stdout and "Traceback" not in done.stderr
    text = (tmp_path / "glm5.prom").read_text()
    assert re.search(r"^glm5_watch_up\{[^}]*\} 0$", text, re.MULTILINE)
    assert re.search(r"^glm5_watch_healthy\{[^}]*\} 0$", text, re.MULTILINE)


def test_metrics_over_http(server: str, canaries: Path) -> None:
    """Read by Prometheus' own parser, while the watch runs."""
    parser = pytest.importorskip("prometheus_client.parser")
    seen: list[str] = []
    from glm5_ascend.serve.local_server import free_port

    port = free_port()

    def scrape(number: int, state: WatchState) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            seen.append(reply.read().decode())

    watch(
        server, canaries=canaries, polls=2, interval=0, metrics_port=port, timeout=ANSWER_S, key=API_KEY, on_poll=scrape
    )
    families = {family.name: family for family in parser.text_string_to_metric_families(seen[-1])}
    values = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert values["glm5_watch_up"] == values["glm5_watch_healthy"] == 1 and values["glm5_watch_polls"] == 2
    assert values["glm5_watch_mtp_tokens_per_step"] > values["glm5_watch_mtp_tokens_per_step_least"] > 1
    assert sum(s.value for s in families["glm5_watch_answers"].samples) == 2 * 14
    assert {s.labels["finding"] for s in families["glm5_watch_finding"].samples} >= set(FAULTS.values())


def test_learning_from_a_broken_server_fails(server: str, tmp_path: Path) -> None:
    with spoiled(FaultProxy(server, "noise")) as url:
        done = glm5_ascend("watch", url, "--learn", tmp_path / "canaries.json", OPENAI_API_KEY=API_KEY)
    assert done.returncode == 1 and "not healthy" in done.stderr and not (tmp_path / "canaries.json").exists()


def test_a_silent_server_is_not_garbage(server: str) -> None:
    """It is asked two questions only, and watched further when it answers again."""
    proxy = FaultProxy(server)
    with spoiled(proxy) as url:
        proxy.target = "http://127.0.0.1:9"

        def back(number: int, state: WatchState) -> None:
            proxy.target = server

        report = watch(url, polls=2, interval=0, timeout=ANSWER_S, key=API_KEY, on_poll=back)
    assert report.last.reached and report.unreachable == 1 and report.exit_code == 0
    assert report.asked == 2 + 5
