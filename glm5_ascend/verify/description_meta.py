"""Checks of the keys of quant_model_description.json that are not tensors.

Read: vllm-ascend 182b75e `modelslim_config.py`, `ascend_config.py`; SGLang 0.5.23 reads none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from glm5_ascend.checkpoint.checks.report import CheckpointFinding, Report
from glm5_ascend.checkpoint.types import (
    DESCRIPTION_META,
    DESCRIPTION_NAME,
    FLOAT,
    INDEXER_CACHE_SUFFIX,
    INDEXER_CACHE_TYPE,
)
from glm5_ascend.model.config import ModelConfig

#: All of them; no engine reads `metadata`.
META = {
    "version",
    "group_size",
    "model_quant_type",
    "metadata",
    "optional",
    "is_rot_used",
    "fa_quant_type",
    "indexer_quant_type",
    "kv_cache_type",
}
#: Caches whose scales lie in tensors that no GLM-5 checkpoint has: key -> what the engine would look for.
_FOREIGN_CACHES = {"fa_quant_type": "fa_k.scale", "kv_cache_type": "k_proj.kv_cache_scale"}


def meta_findings(
    description: Mapping[str, object], types: Collection[str], config: ModelConfig
) -> list[CheckpointFinding]:
    """Return the findings of `verify` for these keys; `types` are those of the linears. No file is read."""
    report = Report(Path())
    check_meta(description, types, config, report)
    return report.findings


def check_meta(description: Mapping[str, object], types: Collection[str], config: ModelConfig, report: Report) -> None:
    """Report wrong, missing and contradictory keys; `types` are those of the linears."""
    for key, why in (
        ("version", "vllm-ascend 0.23 would expect unpacked INT4"),
        ("group_size", "vllm-ascend 0.23 reads an absent key as 256, newer ones refuse anything but 0"),
    ):
        expected, value = DESCRIPTION_META[key], description.get(key)
        if type(value) is not type(expected) or value != expected:
            stated = f"{value!r:.60}" if key in description else "missing"
            _error(report, key, f"is {stated}, expected {expected!r}: {why}", f"set {key} to {expected!r}")
    for key, kind, form in (
        ("is_rot_used", bool, "true or false"),
        ("optional", dict, "an object"),
        ("metadata", dict, "an object"),
    ):
        if not isinstance(description.get(key, kind()), kind):
            _error(report, key, f"is {description[key]!r:.60}, expected {form}")
    _check_model_type(description, types, report)
    _check_caches(description, config, report)


def _error(report: Report, key: str, message: str, fix: str = "quantize again, or correct the description") -> None:
    report.error(f"description.{key}", f"{key} {message}", file=DESCRIPTION_NAME, fix=fix)


def _check_model_type(description: Mapping[str, object], types: Collection[str], report: Report) -> None:
    """Check model_quant_type: the 310P loader of vllm-ascend and MindIE read it, others the types of the tensors."""
    stated, here = description.get("model_quant_type"), sorted(set(types) - {FLOAT}) or [FLOAT]
    if "model_quant_type" not in description:
        report.warning(
            "description.model_quant_type",
            "model_quant_type is missing: readers of this key take the model for FLOAT",
            file=DESCRIPTION_NAME,
            fix=f"set it to one of the linears' types: {', '.join(here)}",
        )
    elif types and stated not in here:
        why = f"is {stated!r:.60}, but the linears are {', '.join(here)}: of another checkpoint"
        _error(report, "model_quant_type", why)


def _check_caches(description: Mapping[str, object], config: ModelConfig, report: Report) -> None:
    for key, tensors in _FOREIGN_CACHES.items():
        if key in description:
            why = (
                f"is {description[key]!r:.60}: the engine would build a cache for {tensors}, which GLM-5 does not have"
            )
            _error(report, key, why, "remove the key")
    marked = [key for key in description if key.endswith(INDEXER_CACHE_SUFFIX)]
    for key in marked:
        _check_layer(config, key, description[key], report)
    key = "indexer_quant_type"
    if key in description and description[key] != INDEXER_CACHE_TYPE:
        _error(report, key, f"is {description[key]!r:.60}, expected {INDEXER_CACHE_TYPE!r}: no engine knows it")
    elif key in description and not marked:
        report.warning(
            f"description.{key}",
            f"{key} is given, but no layer has {INDEXER_CACHE_SUFFIX[1:]}: the engine chooses the layers by itself",
            file=DESCRIPTION_NAME,
            fix="quantize again, or remove the key",
        )
    elif marked and key not in description:
        _error(report, key, f"is missing, but {marked[0]} is there: the engine would not build its INT8 cache")


def _check_layer(config: ModelConfig, key: str, scheme: object, report: Report) -> None:
    """Check the cache key of a layer: if any layer has one, a cache is INT8 only where its key has the right value."""
    layers = (layer for layer in range(config.num_layers_with_mtp) if config.has_indexer(layer))
    fix = "quantize again, or correct the description"
    if key.removesuffix(INDEXER_CACHE_SUFFIX) not in (
        f"{config.spec.layer_prefix(layer)}self_attn" for layer in layers
    ):
        problem = "this layer has none"
    elif scheme != INDEXER_CACHE_TYPE:
        problem = f"{scheme!r:.60}, expected {INDEXER_CACHE_TYPE!r}"
    else:
        return
    report.error(
        "description.cache", f"cache type of an indexer: {problem}", tensor=key, file=DESCRIPTION_NAME, fix=fix
    )
