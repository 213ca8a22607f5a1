"""Recipes for vllm-ascend-recipes: the catalogue's schema, both languages, scripts that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.engine_lines import TRIED_ON, VLLM
from glm5_ascend.errors import ConfigError

SCHEMA = json.loads((Path(__file__).parent / "recipe_schema.json").read_text())


def structure(value: Any) -> Any:
    """The value with every text replaced, which differs between languages."""
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    return [structure(item) for item in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize("name", names())
def test_a_recipe_fits_the_catalogue(name: str) -> None:
    profile = load(name)
    if profile.engine != VLLM or profile.platform == "cpu":
        with pytest.raises(ConfigError, match="catalogue is of vllm-ascend"):
            rendered_texts(profile, "recipe", "/models/glm5")
        return
    texts = rendered_texts(profile, "recipe", "/models/glm5")
    assert list(texts) == [f"models/{language}/THUDM/{name}.yaml" for language in ("en", "zh")]
    english, chinese = map(yaml.safe_load, texts.values())
    jsonschema.validate(english, SCHEMA)
    assert english["meta"]["date_added"] == TRIED_ON  # today's would change the file from day to day
    assert structure(english) == structure(chinese)
    shell = rendered_texts(profile, "shell", "/models/glm5")
    for scenario in english["scenarios"]:
        named = re.findall(r"{{script:([^{}]+)}}", "".join(step["content"] for step in scenario["steps"]))
        assert sorted(named) == sorted(scenario["scripts"])
        for script in set(named) - {"service-check"}:
            assert scenario["scripts"][script]["content"] == shell[f"{script}.sh"]
