"""The first table of deploy/README.md: recipes and profiles that exist and fit together, figures of `plan`."""

from __future__ import annotations

import re

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.plan import plan
from glm5_ascend.plan.proven import entries
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from tests.support.command import ROOT

GIB = 2**30
LAYOUTS = {entry.profile: entry.layout for entry in entries()}
TEXT = (ROOT / "deploy" / "README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.split("## On an Atlas")[0].splitlines()
    if line.startswith("| GLM-")
]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[3]}")
def test_a_row(row: list[str]) -> None:
    models, machine, recipes, profile, weights, caches = row
    name, hardware, nodes = names(profile)[0], "a2" if " A2" in machine else "a3", 2 if "two" in machine else 1
    wanted = load(name).weights["experts"].removesuffix("_DYNAMIC").lower()
    for recipe in names(recipes):
        assert wanted in load_recipe(find_recipe(recipe)).metadata.config_id
    result = plan(
        model=models.split(",")[0].lower(), quant=names(recipes)[0].removeprefix("glm-5.3-"), hardware=hardware,
        nodes=nodes, layout=LAYOUTS[name], workload="in=1024,out=512,concurrency=8",
    ).to_dict()["memory_per_die"]  # fmt: skip
    parts = result["parts"]
    stored = sum(size for title, size in parts.items() if title == "weights" or "copies" in title or "whole" in title)
    assert f"{stored / GIB:.1f}" == weights
    assert f"{(result['usable'] - sum(parts.values())) / GIB:.1f}" == caches
