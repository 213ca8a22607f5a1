"""Where doctor's rules say that vllm-ascend's code does it: the installed files of both lines, at that line."""

from __future__ import annotations

import ast

import pytest

from glm5_ascend.deploy.flag_tables import table, text
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from glm5_ascend.deploy.rules.load import rules
from glm5_ascend.engine_lines import VLLM_ASCEND_030, vllm_ascend_line
from glm5_ascend.serve.flag_table import flag_table
from tests.support.command import ROOT

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("fixture", ["vllm_ascend", "vllm_ascend_030"])
def test_the_word_stands_on_the_line(fixture: str, request: pytest.FixtureRequest) -> None:
    environment: RehearsalEnvironment = request.getfixturevalue(fixture)
    folder, version = environment.site_packages / "vllm_ascend", str(environment.version)
    checked = 0
    for rule in rules():
        if version in rule.read:
            location, _, word = rule.read[version].partition(" ")
            name, _, number = location.partition(":")
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            assert word and word in lines[int(number) - 1], f"{rule.id}: {name}:{number} has no {word}"
            checked += 1
    assert checked > 20


def test_the_keys_that_0_30_takes_are_its_own(vllm_ascend_030: RehearsalEnvironment) -> None:
    """Rule V11: the fields of AscendConfig, and the names that its maker takes out before it builds one."""
    path = vllm_ascend_030.site_packages / "vllm_ascend/ascend_config.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AscendConfig")
    fields = {part.target.id for part in config.body if isinstance(part, ast.AnnAssign)}  # type: ignore[union-attr]
    (taken,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NON_USER_INPUT_KEYS"
    )
    keys = flag_table(VLLM_ASCEND_030.flags).flags["additional-config"]
    assert {name for name in fields | taken if not name.startswith("_")} == set(keys)


@pytest.mark.parametrize("fixture", ["vllm_ascend", "vllm_ascend_030"])
def test_the_tables_of_flags_are_the_parsers(fixture: str, request: pytest.FixtureRequest) -> None:
    """Every flag, type, allowed value and key in deploy/flags, asked from the installed parser."""
    environment: RehearsalEnvironment = request.getfixturevalue(fixture)
    name = vllm_ascend_line(environment.version).flags
    written = (ROOT / "deploy" / "flags" / f"{name}.json").read_text(encoding="utf-8")
    assert text(table(name, environment.python)) == written
