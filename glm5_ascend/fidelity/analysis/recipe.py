"""A recipe file with fall-backs: the recipe that was analysed, its linear_quant steps changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.writer import write_file
from glm5_ascend.errors import OutputError
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import LinearQuant, Recipe, recipe_content
from glm5_ascend.quantize.selector import Selector


def _in_int8(patterns: list[str], method: str) -> dict[str, Any]:
    """A linear_quant step: W8A8_DYNAMIC, rounded by `method`."""
    return {
        "type": "linear_quant",
        "qconfig": {
            "act": {"scope": "per_token", "dtype": "int8", "symmetric": True},
            "weight": {"scope": "per_channel", "dtype": "int8", "symmetric": True, "method": method},
        },
        "include": patterns,
    }


def with_fallbacks(
    recipe: Path, config: ModelConfig, changes: list[tuple[Unit, str]], wide_caches: Iterable[int] = ()
) -> dict[str, Any]:
    """The YAML of `recipe` with every unit of `changes` at its new type, its rules gone: they have been applied.

    A unit that becomes INT8 is rounded as the recipe rounds it in INT4, which is what was measured.

    Args:
        wide_caches: layers whose indexer cache is not INT8 after all.
    """
    raw = recipe_content(recipe)
    value: dict[str, Any] = copy.deepcopy({key: raw[key] for key in ("metadata", "spec")})  # no aliases
    value = {"apiversion": "glm5_ascend_v1"} | value
    value["metadata"]["config_id"] = f"{value['metadata']['config_id']}-fallbacks"
    value["spec"].pop("fallback", None)
    wide = [f"{config.spec.layer_prefix(layer)}*" for layer in wide_caches]
    group: list[Any] = []
    methods: dict[str, str] = {}  # of what becomes INT8, by pattern
    for step in value["spec"]["process"]:
        group = step["configs"] if step["type"] == "group" else group
        if step["type"] == "fa3_quant" and wide:
            step["exclude"] = [*step.get("exclude", []), *wide]
        for each in step["configs"] if step["type"] == "group" else [step]:
            if each["type"] == "linear_quant":
                quant = LinearQuant.model_validate(each)
                selects = Selector(quant, config)
                moved = [(unit, scheme) for unit, scheme in changes if any(map(selects, unit.full_names))]
                each["exclude"] = [*each.get("exclude", []), *(p for unit, _ in moved for p in unit.patterns)]
                method = quant.qconfig.weight.method
                int8 = (unit for unit, scheme in moved if scheme == schemes.W8A8_DYNAMIC)
                methods = {pattern: method for unit in int8 for pattern in unit.patterns} | methods
    more = [_in_int8([p for p in methods if methods[p] == method], method) for method in sorted({*methods.values()})]
    (group if group else value["spec"]["process"]).extend(more)
    return value


def engine_notes(changes: list[tuple[Unit, str]]) -> list[str]:
    """Lines for the recipe's comment: which engine cannot load what it makes."""
    layers = sorted({unit.layer for unit, scheme in changes if unit.experts and scheme == schemes.FLOAT})
    if not layers:
        return []
    named = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
    return [f"SGLang does not load it: routed experts in FLOAT, layers {named}; W8A8_DYNAMIC it does"]


def cache_notes(wide: list[int]) -> list[str]:
    """Lines for the recipe's comment: which indexer caches the rules keep in 16 bits."""
    named = ", ".join(map(str, wide[:16])) + (", ..." if len(wide) > 16 else "")
    return [f"Indexer caches that would change too many keys in INT8 and stay in 16 bits: layers {named}."] * bool(wide)


def check_path(path: Path) -> None:
    """Raises `OutputError` where the recipe cannot be written; nothing is replaced."""
    if path.exists():
        raise OutputError(f"{path}: exists", "name another file with --out, or remove it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "create it, or name another file with --out")


def output_bytes(source: SourceCheckpoint, value: dict[str, Any]) -> int:
    """What `quantize` with this recipe writes, by the quantizer's own plan; a bad recipe is refused here."""
    return QuantizationPlan(source, Recipe.model_validate(value)).output_bytes


def write(path: Path, value: dict[str, Any], comment: list[str]) -> None:
    """Write the recipe under a comment.

    Raises:
        OutputError: the file exists.
    """
    check_path(path)
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment)

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    body = yaml.dump(value, Dumper=Plain, sort_keys=False, width=110)
    write_file(path, head + body)
