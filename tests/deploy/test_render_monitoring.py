"""Alerts, dashboard and the autoscaler's question.

promtool reads them and says when each alert fires; every series is one that vLLM's own source names; a real Prometheus
evaluates all of them on a real server under load; Grafana's own types take the dashboard.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering import autoscaling
from glm5_ascend.deploy.rendering.monitoring import ALERTS, PANELS, dashboard, objects, selected
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.serve.local_server import free_port
from tests.deploy.support.judges import checked, node_packages, program
from tests.deploy.support.replicas import COMPLETE, Program, Replica, Request, chat, replica, wait_for

PROFILE = load("a3-2node")
OF_PANELS = [selected(item, PROFILE) for queries in PANELS.values() for item in queries.values()]
EXPRESSIONS = [*OF_PANELS, *(selected(item[0], PROFILE) for item in ALERTS.values())]
QUESTION = autoscaling.query(PROFILE, PROFILE.roles["server"])
RULES: dict[str, Any] = next(item for item in objects(PROFILE, PodValues()) if item["kind"] == "PrometheusRule")["spec"]


@pytest.mark.long
def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    records = [{"record": f"panel:{i}", "expr": item} for i, item in enumerate([*EXPRESSIONS, QUESTION])]
    groups = [*RULES["groups"], {"name": "panels", "rules": records}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    assert f"{len(ALERTS) + len(records)} rules found" in checked(promtool, "check", "rules", tmp_path / "rules.yaml")


DRAFTS = "vllm:spec_decode_num"
#: Alert -> series that must make it fire within two hours, and the same server's when it is well; a sample a minute.
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
        {
            "vllm:num_requests_running": "2x120",
            "vllm:generation_tokens_total": "50x120",
            "vllm:prompt_tokens_total": "9x120",
        },
        {
            "vllm:num_requests_running": "2x120",
            "vllm:generation_tokens_total": "50+1x120",
            "vllm:prompt_tokens_total": "9x120",
        },
    ),
    "ServerRestarted": (
        {"process_start_time_seconds": "100x90 5000x30"},
        {"process_start_time_seconds": "100x120"},
    ),
    "AnswersRepeat": (
        {
            'vllm:request_success_total{finished_reason="length"}': "0+6x120",
            'vllm:request_success_total{finished_reason="stop"}': "0+4x120",
        },
        {
            'vllm:request_success_total{finished_reason="length"}': "0+4x120",
            'vllm:request_success_total{finished_reason="stop"}': "0+6x120",
        },
    ),
}  # fmt: skip


def labelled(series: str, job: str) -> str:
    """A series as the PodMonitor's scrapes name it."""
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{job="{job}",pod="server-0"{"," if labels else ""}{labels}}}'


@pytest.mark.long
@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_an_alert_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    """Silent on a server that is well, and on another job of the cluster that is not."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES))
    ill, well = FIRING[alert]
    expected = {"exp_labels": {"severity": "warning"}, "exp_annotations": {"summary": ALERTS[alert][2]}}
    cases = []
    for series, job, fires in ((ill, PROFILE.name, True), (well, PROFILE.name, False), (ill, "another", False)):
        samples = [{"series": labelled(name, job), "values": values} for name, values in series.items()]
        labels = {"job": job} if "sum by" not in ALERTS[alert][0] and "max by" not in ALERTS[alert][0] else {}
        firing = {**expected, "exp_labels": {**expected["exp_labels"], "pod": "server-0", **labels}}
        cases.append({
            "interval": "1m", "input_series": samples,
            "alert_rule_test": [{"eval_time": "2h", "alertname": alert, "exp_alerts": [firing] if fires else []}],
        })  # fmt: skip
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": cases}))
    checked(program("promtool", "prometheus"), "test", "rules", tmp_path / "tests.yaml")


@pytest.mark.long
def test_panels_of_the_npu_exporter(tmp_path: Path) -> None:
    """No CPU has these; samples as Ascend's npu-exporter names them."""
    names = [item for item in OF_PANELS if item.startswith("npu_")]
    samples = [{"series": f'{name}{{id="0"}}', "values": "5x10"} for name in names]
    expected_samples = [
        {"expr": name, "eval_time": "5m", "exp_samples": [{"labels": f'{name}{{id="0"}}', "value": 5}]}
        for name in names
    ]
    case = {"interval": "1m", "input_series": samples, "promql_expr_test": expected_samples}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    checked(program("promtool", "prometheus"), "test", "rules", tmp_path / "tests.yaml")
    assert len(names) == 3


def test_every_series_is_one_of_vllms() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "v1"
    names_in_source = set()
    for path in (folder / "metrics" / "loggers.py", folder / "spec_decode" / "metrics.py"):
        names_in_source |= set(re.findall(r'"(vllm:[a-z_]+)"', path.read_text()))
    used = {name for item in [*EXPRESSIONS, QUESTION] for name in re.findall(r"vllm:[a-z_]+", item)}
    assert len(used) > 10
    assert {re.sub(r"_(total|bucket)$", "", name) for name in used} <= names_in_source


def test_every_series_is_of_this_job() -> None:
    for item in [*EXPRESSIONS, QUESTION]:
        for name, job in re.findall(r"(vllm:\w+|process_\w+)(\{job=\"a3-2node\")?", item):
            assert job, (name, item)


def test_the_dashboard_asks_one_source_and_overlaps_nothing() -> None:
    values = json.loads(json.dumps(dashboard(load("a3-pd"))))
    places = [(item["gridPos"]["x"], item["gridPos"]["y"]) for item in values["panels"]]
    assert len(set(places)) == len(places) == len(PANELS)
    (choice,) = values["templating"]["list"]
    assert {item["datasource"]["uid"] for item in values["panels"]} == {f"${{{choice['name']}}}"}


@pytest.mark.long
def test_the_dashboard_is_of_grafanas_types(tmp_path: Path) -> None:
    """TypeScript checks it against @grafana/schema; wrong dashboards are refused."""
    compiler = node_packages(tmp_path, "@grafana/schema@13.2.3", "typescript@7.0.2") / ".bin" / "tsc"
    text = json.dumps(dashboard(PROFILE))
    wrong = {
        "key": ('"schemaVersion"', '"shemaVersion"'),
        "type": ('"h": 8', '"h": "8"'),
        "extra": ('"uid"', '"x": 1, "uid"'),
    }
    boards = {"good": text} | {name: text.replace(*change, 1) for name, change in wrong.items()}
    flags = ("--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext")
    for name, board in boards.items():
        file = tmp_path / f"{name}.ts"
        file.write_text(
            f'import type {{Dashboard}} from "@grafana/schema";\nexport const board: Dashboard = {board};\n'
        )
        done = subprocess.run([compiler, *flags, file], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is (name == "good"), (name, done.stdout[-2000:], done.stderr[-2000:])


@dataclass
class Observed:
    """A server under load, and the Prometheus that scrapes it."""

    server: Replica
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=30) as reply:
            return json.load(reply)["data"]

    def numbers(self, expression: str) -> list[float]:
        return [float(item["value"][1]) for item in self.ask("query", query=expression)["result"]]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, rotated_checkpoint: Path) -> Iterator[Observed]:
    pytest.importorskip("vllm")
    prometheus, folder = program("prometheus", "prometheus"), tmp_path_factory.mktemp("observed")
    server, port = replica(rotated_checkpoint, folder / "server.log"), free_port()
    target = {"targets": [f"127.0.0.1:{server.port}"], "labels": {"pod": f"{PROFILE.name}-0"}}
    (folder / "rules.yaml").write_text(yaml.safe_dump(RULES))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": PROFILE.name, "static_configs": [target]}],
    }))  # fmt: skip
    flags = {"config.file": folder / "prometheus.yaml", "storage.tsdb.path": folder / "data",
             "web.listen-address": f"127.0.0.1:{port}"}  # fmt: skip
    watcher = Program([prometheus, *(f"--{key}={value}" for key, value in flags.items())], folder / "prometheus.log")
    stop = threading.Event()
    asked: list[Request] = []

    def load_it(number: int) -> None:
        """Send requests with a common prefix, so that the prefix cache is used."""
        talk = "Add the numbers. " * 30
        while not stop.is_set():
            text = f"{talk} What is {len(asked) % 40} + {number}?"
            asked.append(Request(server.url, str(number), chat([{"role": "user", "content": text}], max_tokens=24)))
            asked[-1].run()

    clients = [threading.Thread(target=load_it, args=(i,)) for i in range(3)]
    try:
        server.start()
        server.wait_until_healthy(server.url)
        watcher.start()
        for client in clients:
            client.start()
        yield Observed(server, f"http://127.0.0.1:{port}")
    finally:
        stop.set()
        for client in clients:
            if client.ident is not None:
                client.join()
        watcher.kill()
        server.kill()
    assert asked and all(item.fate == COMPLETE for item in asked), [(e.status, e.detail) for e in asked]


def without_limit(expression: str) -> str:
    """Remove the comparison of an alert, whose result is empty on a healthy server."""
    compared, count = re.subn(r" [<>] [\d.]+$", "", expression)
    assert count == 1
    return compared.replace(" == 0 and ", " and ")


@pytest.mark.server
@pytest.mark.long
def test_prometheus_evaluates_all_on_a_real_server_under_load(observed: Observed) -> None:
    """Each panel has a number, each alert one to compare, and the autoscaler its answer."""
    names_in_source = [item for item in OF_PANELS if not item.startswith("npu_")]
    compared = [without_limit(selected(item[0], PROFILE)) for item in ALERTS.values()]
    missing = [*names_in_source, *compared, QUESTION]

    def all_known() -> bool:
        missing[:] = [item for item in missing if not any(map(math.isfinite, observed.numbers(item)))]
        return not missing

    wait_for(lambda: healthy_prometheus(observed), "Prometheus")
    try:
        wait_for(all_known, "every expression")  # windows of minutes, and a first minute of the subquery
    except AssertionError:
        raise AssertionError(f"no number for {missing}") from None
    for item in [*names_in_source, *compared, QUESTION]:
        print(f"{item}: {observed.numbers(item)}")
    (positions,) = [item for title, queries in PANELS.items() if "by position" in title for item in queries.values()]
    values = observed.numbers(selected(positions, PROFILE))
    assert len(values) == 3 and all(0 <= item <= 1 for item in values)  # three draft tokens
    assert all(0 <= item <= 1 for item in observed.numbers(selected(PANELS["Prefix hits"]["share"], PROFILE)))
    assert 1 <= max(observed.numbers(QUESTION)) <= 3 or observed.numbers(QUESTION) == [0.0]
    (group,) = observed.ask("rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == dict.fromkeys(ALERTS, "ok")


def healthy_prometheus(observed: Observed) -> bool:
    try:
        with urllib.request.urlopen(f"{observed.url}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
