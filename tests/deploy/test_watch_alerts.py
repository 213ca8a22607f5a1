"""deploy/watch-alerts.yaml: promtool says that each alert fires for a bad series and is silent for a good one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.support.judges import checked, program
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
def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    (rules,) = yaml.safe_load(FILE.read_text())["groups"]
    assert [rule["alert"] for rule in rules["rules"]] == list(FIRING)
    cases: list[dict[str, Any]] = []
    for rule in rules["rules"]:
        firing = {"exp_labels": {"url": "u", **rule["labels"]}, "exp_annotations": rule["annotations"]}
        for series, expected in zip(FIRING[rule["alert"]], ([firing], []), strict=True):
            test = {"eval_time": "2h", "alertname": rule["alert"], "exp_alerts": expected}
            samples = [{"series": name, "values": values} for name, values in series.items()]
            cases.append({"interval": "1m", "input_series": samples, "alert_rule_test": [test]})
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": [str(FILE)], "tests": cases}))
    checked(program("promtool", "prometheus"), "test", "rules", tmp_path / "tests.yaml")
