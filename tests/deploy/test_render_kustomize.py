"""The kustomize tree, built by kubectl's own kustomize where kubectl is installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from glm5_ascend.deploy import render
from glm5_ascend.deploy.rendering.templates import yaml_value
from tests.deploy.support.rendered import SHAPES
from tests.support.command import said


def test_the_overlay_builds_what_k8s_writes_and_the_secret(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    for name in SHAPES:
        render(name, "kustomize", out=tmp_path / name)
        render(name, "k8s", out=tmp_path / f"{name}-k8s")
        text = said("kubectl", "kustomize", tmp_path / name / "overlays" / "mine")
        built = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text)}
        assert built.pop(("Secret", "glm5-api-key"))["data"] == {"key": ""}
        files = (tmp_path / f"{name}-k8s").glob("*.yaml")
        plain = [item for path in files for item in yaml.safe_load_all(path.read_text())]
        assert built == {(item["kind"], item["metadata"]["name"]): item for item in plain}


@pytest.mark.parametrize("word", ["1e3", "12E-3", "0o17", "+1.5e3", ".5e3", "1234567890123e45", "yes", "12"])
def test_words_that_are_numbers_elsewhere_are_quoted(word: str) -> None:
    """Kubernetes' reader takes 1e3 for a number, and a Secret's name or an annotation is none."""
    assert yaml_value(word) == f"'{word}'"


def test_scripts_are_blocks_and_nothing_is_an_anchor(tmp_path: Path) -> None:
    render("a3-pd", "k8s", out=tmp_path / "k8s")
    for path in (tmp_path / "k8s").glob("*.yaml"):
        text = path.read_text()
        assert not re.search(r"[&*]id\d", text)
        if "kind: ConfigMap" in text:
            assert re.search(r"\.sh: \|\n +#!/usr/bin/env bash", text)
