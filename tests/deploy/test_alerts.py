"""Alerts: promtool says when each fires, and every series is one that vLLM's own source names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.deploy.rendering.templates import rendered
from glm5_ascend.deploy.rendering.values import PodValues
from tests.deploy.support.judges import AlertCase, judge_alerts
from tests.support.command import ROOT

PROFILE = load("a3-2node")
MONITORED = PodValues.model_validate({"monitoring": {"enabled": True}})
_, RULES = yaml.safe_load_all(rendered_texts(PROFILE, "k8s", "/m", MONITORED)["monitoring.yaml"])
ALERTS: list[dict[str, Any]] = RULES["spec"]["groups"][0]["rules"]
EXPRESSIONS = [alert["expr"] for alert in ALERTS]
DRAFTS = "vllm:spec_decode_num"
RUNNING, GENERATED = "vllm:num_requests_running", "vllm:generation_tokens_total"
ANSWERS = 'glm5_watch_answers_total{{url="u",outcome="{}"}}'.format
ENDED = 'vllm:request_success_total{{finished_reason="{}"}}'.format
#: Alert -> series that must make it fire within two hours, and those of a server that is well; a sample a minute.
FIRING: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "MtpAcceptanceFell": (
        {f"{DRAFTS}_accepted_tokens_total": "0+29x120", f"{DRAFTS}_draft_tokens_total": "0+100x120"},
        {f"{DRAFTS}_accepted_tokens_total": "0+31x120", f"{DRAFTS}_draft_tokens_total": "0+100x120"},
    ),
    "RequestsWait": (
        {"vllm:num_requests_waiting": "1x120"},
        {"vllm:num_requests_waiting": " ".join(["9x8 0"] * 12)},
    ),
    "CacheFull": ({"vllm:kv_cache_usage_perc": "0.96x120"}, {"vllm:kv_cache_usage_perc": "0.94x120"}),
    "StandsStill": (
        {RUNNING: "2x120", GENERATED: "50x120", "vllm:prompt_tokens_total": "9x120"},
        {RUNNING: "2x120", GENERATED: "50+1x120", "vllm:prompt_tokens_total": "9x120"},
    ),
    "ServerRestarted": (
        {"process_start_time_seconds": "100x90 5000x30"},
        {"process_start_time_seconds": "100x120"},
    ),
    "AnswersRepeat": (
        {ENDED("length"): "0+6x120", ENDED("stop"): "0+4x120"},
        {ENDED("length"): "0+4x120", ENDED("stop"): "0+6x120"},
    ),
    "GarbageFound": (
        {'glm5_watch_finding{url="u",finding="repeats"}': "0x100 1x20"},
        {'glm5_watch_finding{url="u",finding="repeats"}': "0x120"},
    ),
    "BadAnswers": (
        {ANSWERS("good"): "0+8x120", ANSWERS("repeats"): "0+1x120"},
        {ANSWERS("good"): "0+10x120", ANSWERS("repeats"): "0+1x120", ANSWERS("silent"): "0+50x120"},
    ),
    "ServerIsSilent": ({'glm5_watch_up{url="u"}': "0x120"}, {'glm5_watch_up{url="u"}': "1x120"}),
    "WatchStopped": (
        {'glm5_watch_last_poll_timestamp_seconds{url="u"}': "3000x120"},
        {'glm5_watch_last_poll_timestamp_seconds{url="u"}': "0+60x120"},
    ),
}


def labelled(series: str, job: str) -> str:
    """A series as the PodMonitor's scrapes name it."""
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{job="{job}",pod="server-0"{"," if labels else ""}{labels}}}'


def firing(alert: dict[str, Any], **labels: str) -> list[dict[str, Any]]:
    return [{"exp_labels": labels | alert["labels"], "exp_annotations": alert["annotations"]}]


@pytest.mark.long
def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """Silent on a server that is well, and on another job of the cluster that is not."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES["spec"]))
    cases: list[AlertCase] = []
    for alert in ALERTS:
        ill, well = FIRING[alert["alert"]]
        grouped = "sum by" in alert["expr"] or "max by" in alert["expr"]
        fired = firing(alert, pod="server-0", **({} if grouped else {"job": PROFILE.name}))
        for series, job, expected in ((ill, PROFILE.name, fired), (well, PROFILE.name, []), (ill, "another", [])):
            cases.append((alert["alert"], {labelled(name, job): values for name, values in series.items()}, expected))
    judge_alerts(tmp_path / "rules.yaml", cases)


@pytest.mark.long
def test_an_alert_of_watch_fires_when_it_should_and_only_then() -> None:
    file = ROOT / "deploy/watch-alerts.yaml"
    (rules,) = yaml.safe_load(file.read_text())["groups"]
    cases: list[AlertCase] = []
    for alert in rules["rules"]:
        ill, well = FIRING[alert["alert"]]
        cases += [(alert["alert"], ill, firing(alert, url="u")), (alert["alert"], well, [])]
    judge_alerts(file, cases)


def test_every_series_is_one_of_vllms_and_of_this_job() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "v1"
    names_in_source = set()
    for path in (folder / "metrics" / "loggers.py", folder / "spec_decode" / "metrics.py"):
        names_in_source |= set(re.findall(r'"(vllm:[a-z_]+)"', path.read_text()))
    used = {name for item in [*EXPRESSIONS, rendered("health.sh.j2")] for name in re.findall(r"vllm:[a-z_]+", item)}
    assert len(used) > 5
    assert {re.sub(r"_(total|bucket)$", "", name) for name in used} <= names_in_source
    for expression in EXPRESSIONS:
        for name, job in re.findall(r"(vllm:\w+|process_\w+)(\{job=\"a3-2node\")?", expression):
            assert job, (name, expression)
