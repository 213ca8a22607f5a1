"""deploy/watch-alerts.yaml: promtool says that each alert fires for a bad series and is silent for a good one."""

from __future__ import annotations

import pytest
import yaml

from tests.deploy.support.judges import AlertCase, judge_alerts
from tests.support.command import ROOT

FILE = ROOT / "deploy/watch-alerts.yaml"
ANSWERS = 'glm5_watch_answers_total{{url="u",outcome="{}"}}'.format
#: Alert -> series that must make it fire within two hours, and those of a healthy server; a sample a minute.
FIRING: dict[str, tuple[dict[str, str], dict[str, str]]] = {
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


@pytest.mark.long
def test_an_alert_fires_when_it_should_and_only_then() -> None:
    (rules,) = yaml.safe_load(FILE.read_text())["groups"]
    assert [rule["alert"] for rule in rules["rules"]] == list(FIRING)
    cases: list[AlertCase] = []
    for rule in rules["rules"]:
        firing = {"exp_labels": {"url": "u", **rule["labels"]}, "exp_annotations": rule["annotations"]}
        ill, well = FIRING[rule["alert"]]
        cases += [(rule["alert"], ill, [firing]), (rule["alert"], well, [])]
    judge_alerts(FILE, cases)
