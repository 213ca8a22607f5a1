"""YAML files are read key by key: unknown keys are refused with their line, and editors get the same as a schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from glm5_ascend.deploy.generated import SCHEMAS, page
from glm5_ascend.deploy.profiles.file import ProfileFile
from glm5_ascend.deploy.rules.load import RuleFile
from glm5_ascend.errors import ConfigError
from glm5_ascend.files.resources import schema_text
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.quantize.recipe import Recipe
from tests.support.command import ROOT

RULE = "- {id: X, topic: indexer, level: error, when: a, message: m, fix: f, source: s}\n"


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (ProfileFile, "name: x\nroles:\n  server:\n    nodez: 1\n", ":4: roles.server.nodez: unknown key"),
        (ProfileFile, "name: x\nbase:\n  env:\n    A: 1\n", ":4: base.env.A: Input should be a valid string, got 1"),
        (RuleFile, RULE + RULE.replace("error", "fatal"), ":2: 1.level: Input should be 'error' or 'warning'"),
        (RuleFile, RULE + RULE.replace("fix: f, ", ""), ":2: 1.fix: key is missing"),
        (RuleFile, "a: 1\n", ":1: the file: Input should be a valid list"),
        (RuleFile, "- {id: [\n", ": not valid YAML"),
    ],
)
def test_what_no_model_knows_is_refused_by_line(
    model: type[BaseModel], text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, model)
    assert str(caught.value).startswith(f"{path}:") and message in str(caught.value) and caught.value.tip


SCHEMA_FILES = {ROOT / "deploy" / "schemas" / name: model for name, model in SCHEMAS.items()}
SCHEMA_FILES[ROOT / "quant_recipes" / "schema.json"] = Recipe
SCHEMA_FILES[ROOT / "glm5_ascend" / "plan" / "data" / "schemas" / "hardware.json"] = Hardware


@pytest.mark.parametrize("path", SCHEMA_FILES, ids=lambda path: path.name)
def test_schemas_are_current(path: Path) -> None:
    """`python -m` of deploy.generated, quantize.recipe and plan.hardware (all in glm5_ascend) writes them."""
    assert path.read_text("utf-8") == schema_text(SCHEMA_FILES[path])


def test_the_page_of_troubleshooting_is_current() -> None:
    """`python -m glm5_ascend.deploy.generated` writes it from the rules."""
    assert page() == (ROOT / "deploy" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")


def test_every_yaml_file_names_its_schema() -> None:
    folders = ("deploy", "quant_recipes", "glm5_ascend/plan/data/hardware")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.yaml")]
    files.remove(ROOT / "deploy" / "watch-alerts.yaml")  # Prometheus' own format; promtool checks it
    assert files
    for path in files:
        first = path.read_text("utf-8").splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema="), path
        assert (path.parent / first.partition("=")[2]).resolve() in SCHEMA_FILES, path
