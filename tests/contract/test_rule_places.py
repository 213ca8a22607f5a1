"""Where doctor's rules say that vllm-ascend's code does it: the installed files of both lines, at that line."""

from __future__ import annotations

import pytest

from glm5_ascend.deploy.rehearsal.environment import site_packages
from glm5_ascend.deploy.rules.load import rules
from tests.contract.support.vllm_ascend import VllmAscend

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("fixture", ["vllm_ascend", "vllm_ascend_030"])
def test_the_word_stands_on_the_line(fixture: str, request: pytest.FixtureRequest) -> None:
    environment: VllmAscend = request.getfixturevalue(fixture)
    folder, version = site_packages(environment.python) / "vllm_ascend", str(environment.version)
    checked = 0
    for rule in rules():
        if version in rule.read:
            place, _, word = rule.read[version].partition(" ")
            name, _, number = place.partition(":")
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            assert word and word in lines[int(number) - 1], f"{rule.id}: {name}:{number} has no {word}"
            checked += 1
    assert checked > 20
