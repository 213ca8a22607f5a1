"""The kustomize tree, built by kubectl's own kustomize where kubectl is installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5_ascend.deploy import render
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.yaml_text import dumped
from tests.deploy.support.judges import checked
from tests.deploy.support.rendered import SHAPES


def built(folder: Path, *components: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects of `overlays/mine` with some components."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    mine = folder / "overlays" / "mine" / "kustomization.yaml"
    content = yaml.safe_load(mine.read_text()) | {"components": [f"../../components/{item}" for item in components]}
    mine.write_text(yaml.safe_dump(content))
    text = checked("kubectl", "kustomize", folder / "overlays" / "mine")
    return {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text)}


@pytest.mark.parametrize("name", SHAPES)
def test_every_component_builds(name: str, tmp_path: Path) -> None:
    render(name, "kustomize", out=tmp_path / "out")
    offered = sorted(path.name for path in (tmp_path / "out" / "components").iterdir())
    more = [] if load(name).proxy else ["autoscaling", "two-replicas"]
    assert offered == sorted(["auth", "monitoring", "pvc", "volcano", *more])
    offered = [item for item in offered if item != "autoscaling"]  # it takes the number that two-replicas sets
    objects = built(tmp_path / "out", *offered)
    assert ("Secret", "glm5-api-key") in objects
    servers = [item for (kind, _), item in objects.items() if kind in ("LeaderWorkerSet", "Deployment")]
    count = 0
    for item in servers:
        template = item["spec"].get("leaderWorkerTemplate") or {"leaderTemplate": item["spec"]["template"]}
        for key in ("leaderTemplate", "workerTemplate"):
            spec = template.get(key, {}).get("spec", {})
            if not spec or spec["containers"][0]["name"] != "server":
                continue
            count += 1
            claim = {"name": "model", "persistentVolumeClaim": {"claimName": "glm5-weights", "readOnly": True}}
            assert spec["schedulerName"] == "volcano" and claim in spec["volumes"]
            group = template[key]["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
            assert ("PodGroup", group) in objects
            assert item["spec"]["replicas"] == (1 if load(name).proxy else 2)
    assert count == sum(2 if role.nodes > 1 else 1 for role in load(name).roles.values())


def test_the_base_alone_is_what_k8s_writes(tmp_path: Path) -> None:
    render("a3-2node", "kustomize", out=tmp_path / "out")
    render("a3-2node", "k8s", out=tmp_path / "k8s")
    plain = [item for path in (tmp_path / "k8s").glob("*.yaml") for item in yaml.safe_load_all(path.read_text())]
    assert built(tmp_path / "out") == {(item["kind"], item["metadata"]["name"]): item for item in plain}


def test_the_autoscalers_component_is_what_its_value_gives(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("autoscaling: {enabled: true}")
    render("a3-2node", "kustomize", out=tmp_path / "component")
    render("a3-2node", "kustomize", out=tmp_path / "value", values=tmp_path / "mine.yaml")
    assert built(tmp_path / "component", "autoscaling") == built(tmp_path / "value")


@pytest.mark.parametrize("word", ["1e3", "12E-3", "0o17", "+1.5e3", ".5e3", "1234567890123e45", "yes", "12"])
def test_words_that_are_numbers_elsewhere_are_quoted(word: str) -> None:
    """Kubernetes' reader takes 1e3 for a number, and a Secret's name or an annotation is none."""
    assert dumped([{"name": word}]) == f"name: '{word}'\n"


def test_scripts_are_blocks_and_nothing_is_an_anchor(tmp_path: Path) -> None:
    render("a3-pd", "k8s", out=tmp_path / "k8s")
    for path in (tmp_path / "k8s").glob("*.yaml"):
        text = path.read_text()
        assert not re.search(r"[&*]id\d", text)
        if "kind: ConfigMap" in text:
            assert re.search(r"\.sh: \|\n +#!/usr/bin/env bash", text)
