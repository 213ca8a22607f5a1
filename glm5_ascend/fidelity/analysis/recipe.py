"""Recipe files with fall-backs: the analyzed recipe with changed linear_quant steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from glm5_ascend.checkpoint import schemes
from glm5_ascend.errors import OutputError
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.files.written import write_named
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.recipe import LinearQuant, recipe_content
from glm5_ascend.quantize.selector import Selector


def with_fallbacks(
    recipe: Path, config: ModelConfig, changes: list[tuple[Unit, str]], wide_caches: Iterable[int] = ()
) -> dict[str, Any]:
    """The YAML of `recipe` with the units of `changes` at their new types and without its rules, which are applied.

    A unit that becomes INT8 is rounded by the method that the recipe has for it, which is what was measured.

    Args:
        wide_caches: layers whose indexer cache stays in 16 bits.
    """
    raw = recipe_content(recipe)
    copied = parse_json(json.dumps({key: raw[key] for key in ("metadata", "spec")}))  # without YAML's anchors
    value: dict[str, Any] = {"apiversion": "glm5_ascend_v1", **copied}
    value["metadata"]["config_id"] = f"{value['metadata']['config_id']}-fallbacks"
    value["spec"].pop("fallback", None)
    wide = [f"{config.spec.layer_prefix(layer)}*" for layer in wide_caches]
    process = target = value["spec"]["process"]
    methods: dict[str, str] = {}  # method of the units that become INT8, by pattern
    for step in process:
        if step["type"] == "fa3_quant" and wide:
            step["exclude"] = [*step.get("exclude", []), *wide]
        if step["type"] == "group":
            target = step["configs"]
        for linear_step in step["configs"] if step["type"] == "group" else [step]:
            if linear_step["type"] == "linear_quant":
                quant = LinearQuant.model_validate(linear_step)
                selects = Selector(quant, config)
                moved = [(unit, scheme) for unit, scheme in changes if any(map(selects, unit.full_names))]
                patterns = [pattern for unit, _ in moved for pattern in unit.patterns]
                linear_step["exclude"] = [*linear_step.get("exclude", []), *patterns]
                method = quant.qconfig.weight.method
                int8 = (unit for unit, scheme in moved if scheme == schemes.W8A8_DYNAMIC)
                methods = {pattern: method for unit in int8 for pattern in unit.patterns} | methods
    for method in sorted({*methods.values()}):
        target.append(_int8_step([pattern for pattern in methods if methods[pattern] == method], method))
    return value


def _int8_step(patterns: list[str], method: str) -> dict[str, Any]:
    return {
        "type": "linear_quant",
        "qconfig": {
            "act": {"scope": "per_token", "dtype": "int8", "symmetric": True},
            "weight": {"scope": "per_channel", "dtype": "int8", "symmetric": True, "method": method},
        },
        "include": patterns,
    }


def check_path(path: Path) -> None:
    """Raises `OutputError` where the recipe cannot be written; an existing file is not replaced."""
    if path.exists():
        raise OutputError(f"{path}: exists", "name another file with --out, or remove it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "create it, or name another file with --out")


def write(path: Path, value: dict[str, Any], comment: list[str]) -> None:
    """Write the recipe under a comment.

    Raises:
        OutputError: the file exists.
    """
    check_path(path)
    head = "".join(f"# {line}\n" for line in comment)
    write_named(path, head + yaml.safe_dump(value, sort_keys=False, width=110))
