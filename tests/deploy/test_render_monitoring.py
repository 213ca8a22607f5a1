"""Alerts and dashboard: accepted by promtool, and every series is one that vLLM's own source names."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.monitoring import ALERTS, PANELS, dashboard, objects
from glm5_ascend.deploy.rendering.values import PodValues
from tests.deploy.support.judges import checked, program

EXPRESSIONS = [each for queries in PANELS.values() for each in queries.values()] + [each[0] for each in ALERTS.values()]


@pytest.mark.long
def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    rule = next(each for each in objects(load("a3-2node"), PodValues()) if each["kind"] == "PrometheusRule")
    records = [{"record": f"panel:{i}", "expr": each} for i, each in enumerate(EXPRESSIONS)]
    groups = [*rule["spec"]["groups"], {"name": "panels", "rules": records}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    assert f"{len(ALERTS) + len(EXPRESSIONS)} rules found" in checked(
        promtool, "check", "rules", tmp_path / "rules.yaml"
    )


def test_every_series_is_one_of_vllms() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "v1"
    known = set()
    for path in (folder / "metrics" / "loggers.py", folder / "spec_decode" / "metrics.py"):
        known |= set(re.findall(r'"(vllm:[a-z_]+)"', path.read_text()))
    used = {name for each in EXPRESSIONS for name in re.findall(r"vllm:[a-z_]+", each)}
    assert len(used) > 10
    assert {re.sub(r"_(total|bucket)$", "", name) for name in used} <= known


def test_the_dashboard_asks_one_source_and_overlaps_nothing() -> None:
    found = json.loads(json.dumps(dashboard(load("a3-pd"))))
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in found["panels"]]
    assert len(set(places)) == len(places) == len(PANELS)
    (choice,) = found["templating"]["list"]
    assert {each["datasource"]["uid"] for each in found["panels"]} == {f"${{{choice['name']}}}"}
