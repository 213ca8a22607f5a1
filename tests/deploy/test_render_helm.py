"""The chart, by the real helm: it accepts it, and makes of it what `k8s` writes, for every profile and many values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5_ascend.deploy import render
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.errors import ConfigError
from tests.deploy.support import helm as real
from tests.deploy.support.rendered import ATLAS
from tests.deploy.test_render_values import VALUES
from tests.support.once import made_once, run_folder

#: Each key away from its default, some of them to values that YAML would read as something else.
CASES = {
    "defaults": "{}",
    "values": VALUES,
    "open": "auth: {open: true, allow_from: []}\nlife: {check: false, drain_s: 0, leave_s: 0, start_minutes: 1440}",
    "words": 'namespace: "123"\nauth: {api_key_secret: "1e3", allow_from: [{ipBlock: {cidr: 10.0.0.0/8}}]}\n'
    'image: {registry: "host:5000/a//", router_digest: "sha256:%s", pull_policy: Always, pull_secrets: ["1", b]}\n'
    'scheduling: {scheduler: "0", node_selector: {a: "yes", "{{b}}": "{{ .Values.x }}"}}' % ("1" * 64),
    "security": "security: {user: 1000, device_group: 0, capabilities: [], read_only_root: false}\n"
    "network: {host: true}\nstorage: {logs: 1Gi, claim: w}\nresources: {shm: 1Ti, cpu: '1'}\nreplicas: 0",
    "scheduled": "scheduling: {priority_class: '1', labels: {ring-controller.atlas: ascend-910b, "
    "app.kubernetes.io/instance: mine}, annotations: {a/b: 'yes', glm5-ascend/config: mine}, pod_group: true}\n"
    "life: {still_minutes: 0}\nresources: {disk: '1'}",
    "root": "security: {user: 0}\nnetwork: {host: false, nic: '1'}\nscheduling: {pod_group: true, scheduler: mine}",
    "seen": "server: {flags: [--max-num-seqs, '8', '{\"a\": 1}'], env: {B: '{{1}}', A_1: '\"x\\y'}}\n"
    "monitoring: {enabled: true, labels: {release: '1', app.kubernetes.io/part-of: mine}}\nreplicas: 1000\n"
    "autoscaling: {enabled: true, minimum: 2, maximum: 9, requests: 100000, prometheus: 'https://p.q:1/x'}",
}
Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return real.usable(made_once(run_folder(tmp_path_factory, request.config), "helm", real.fetch))


def by_name(texts: list[str]) -> Objects:
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects) > 0
    return found


def templated(helm: Path, chart: Path, *values: object) -> Objects:
    done = real.run(helm, "template", "glm5", chart, *(word for each in values for word in ("--values", each)))
    assert done.returncode == 0, done.stderr
    return by_name([done.stdout])


def one_group(name: str, case: str) -> str:
    """The proxy of PD takes no second group."""
    one = {"replicas": 1, "autoscaling": {}}
    return json.dumps({**yaml.safe_load(CASES[case]), **one}) if load(name).proxy else CASES[case]


#: One machine, several, PD, SGLang; the others with the long tests.
IN_SHORT = ("a3-single-w4a8", "a3-2node", "a3-pd", "a3-pd-sglang")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_SHORT else [pytest.mark.long]) for n in ATLAS])
def test_helm_makes_what_k8s_writes(name: str, tmp_path: Path, helm: Path) -> None:
    render(name, "helm", out=tmp_path / "helm")
    linted = real.run(helm, "lint", "--strict", tmp_path / "helm" / "chart")
    assert linted.returncode == 0, linted.stdout + linted.stderr
    for case in CASES:
        mine = tmp_path / f"{case}.yaml"
        mine.write_text(one_group(name, case))
        render(name, "k8s", out=tmp_path / case, values=mine)
        want = by_name([path.read_text() for path in sorted((tmp_path / case).glob("*.yaml"))])
        found = templated(helm, tmp_path / "helm" / "chart", mine)
        assert found.keys() == want.keys(), case
        for key, each in want.items():
            assert found[key] == each, (case, key)


def test_the_cases_change_every_key() -> None:
    """A key of the values that no case sets away from its default would not be compared."""
    plain = PodValues().model_dump()
    changed = {
        (part, key)
        for case in CASES.values()
        for part, value in PodValues.model_validate(yaml.safe_load(case)).model_dump().items()
        for key in (value if isinstance(value, dict) else [None])
        if (value[key] != plain[part][key] if key is not None else value != plain[part])
    }
    every = {(part, key) for part, value in plain.items() for key in (value if isinstance(value, dict) else [None])}
    assert changed == every


def test_values_given_to_render_are_the_charts_own_and_mine_win(tmp_path: Path, helm: Path) -> None:
    (tmp_path / "given.yaml").write_text(VALUES)
    render("a3-2node", "helm", out=tmp_path / "helm", values=tmp_path / "given.yaml")
    render("a3-2node", "k8s", out=tmp_path / "k8s", values=tmp_path / "given.yaml")
    want = by_name([path.read_text() for path in sorted((tmp_path / "k8s").glob("*.yaml"))])
    folder = tmp_path / "helm"
    assert templated(helm, folder / "chart") == templated(helm, folder / "chart", folder / "mine.yaml") == want
    (folder / "mine.yaml").write_text("replicas: 3\n")
    found = templated(helm, folder / "chart", folder / "mine.yaml")
    assert found["LeaderWorkerSet", "a3-2node"]["spec"]["replicas"] == 3
    assert PodValues.model_validate(yaml.safe_load((folder / "chart" / "values.yaml").read_text())).replicas == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a3-2node", "replica: 2", "replica"),
        ("a3-2node", "network: {nic: 'a b'}", "nic"),
        ("a3-2node", "replicas: '2'", "replicas"),
        ("a3-2node", "auth: {api_key_secret: A B}", "api_key_secret"),
        ("a3-pd", "replicas: 2", "one group"),
        ("a3-pd", "autoscaling: {enabled: true}", "one group"),
        ("a3-2node", "autoscaling: {enabled: true, minimum: 5}", "minimum is above maximum"),
    ],
)
def test_helm_refuses_what_render_refuses(name: str, text: str, said: str, tmp_path: Path, helm: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    for target in ("k8s", "helm"):
        with pytest.raises(ConfigError):
            render(name, target, out=tmp_path / target, values=tmp_path / "mine.yaml")
    render(name, "helm", out=tmp_path / "out")
    done = real.run(helm, "template", "glm5", tmp_path / "out" / "chart", "--values", tmp_path / "mine.yaml")
    assert done.returncode != 0 and said in done.stderr, done.stderr


def test_the_notes_say_whether_anyone_may_ask(tmp_path: Path, helm: Path) -> None:
    """Client-side, without a cluster."""
    render("a3-pd", "helm", out=tmp_path / "out")
    said = []
    for flags in ([], ["--set", "auth.open=true"]):
        words = ("install", "glm5", tmp_path / "out" / "chart", "--dry-run=client", *flags)
        done = real.run(helm, *words)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.partition("NOTES:")[2])
    assert "Secret glm5-api-key" in said[0] and "Anyone" not in said[0] and "service/a3-pd-proxy" in said[0]
    assert "Anyone who reaches it may ask" in said[1]
