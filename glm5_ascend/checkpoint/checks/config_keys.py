"""Checks of config.json key by key: values that the engines would read differently. No tensor is needed.

Read: vLLM 0.32 `deepseek_v2.py` and `transformers_utils/config.py`, transformers 5.19 `GlmMoeDsaConfig`, vllm-ascend
182b75e, SGLang 0.5.23. Sizes that no model could have are refused before, by `load_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.engine_view import ENGINE_VIEWS
from glm5_ascend.model.config import SPECS
from glm5_ascend.model.config_file import completed, flat_keys
from glm5_ascend.model.config_values import indexer_schedule, schedule_keys
from glm5_ascend.model.spec import Architecture

CONFIG = "config.json"
#: Two keys that must agree, and who reads the second one instead of the first.
_ALIASES = {
    "num_local_experts": ("n_routed_experts", "transformers and vLLM read it as n_routed_experts"),
    "num_experts": ("n_routed_experts", "transformers and vLLM put it in the place of n_routed_experts"),
    "num_key_value_heads": ("num_attention_heads", "transformers would repeat keys of latent attention"),
}
DTYPES = ("bfloat16", "float16", "float32")
#: What `AutoConfig` takes where the key is missing.
_DEFAULT_DENSE = 3


def check_config(raw: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Report keys that are left over, missing or contradictory.

    Returns:
        the keys of the language model, with the defaults of those that `raw` leaves out.
    """
    full = completed(raw)
    keys = flat_keys(full)
    text_config = raw.get("text_config")
    for where, section in (("", raw), ("text_config.", text_config if isinstance(text_config, dict) else {})):
        for key in ("quantization_config", "compression_config"):
            if key in section:
                why = f"{where}{key} is present: the engine would never open {DESCRIPTION_NAME}"
                _error(report, key, why, "remove it from a quantized checkpoint; an FP8 source needs it")
    spec = SPECS[raw["model_type"]]
    architectures, expected = raw.get("architectures"), spec.architecture
    if not isinstance(architectures, list) or expected not in architectures:
        why = f"architectures is {architectures!r:.80}: vLLM would serve embeddings or another model"
        _error(report, "architectures", why, f'write "architectures": ["{expected}"]')
    if raw.get("auto_map"):
        why = "auto_map names code of the checkpoint: with trust_remote_code an engine runs it, or stops without it"
        _error(report, "auto_map", why)
    _check_defaults(raw, full, spec, report)
    _check_dtype(keys, report)
    _check_experts(keys, spec, report)
    _check_rope(keys, report)
    _check_end_tokens(keys, spec, report)
    _check_indexer_schedule(keys, report)
    return keys


def require_sound_config(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for the first error of `check_config`; `raw` has passed `parse_config`."""
    report = Report(directory)
    check_config(raw, report)
    report.raise_first_error(CONFIG)


def _error(report: Report, key: str, message: str, fix: str = "remove the key") -> None:
    report.error(f"config.{key}", message, file=CONFIG, fix=fix)


def _warning(report: Report, key: str, message: str, fix: str) -> None:
    report.warning(f"config.{key}", message, file=CONFIG, fix=fix)


def _check_defaults(raw: Mapping[str, Any], full: Mapping[str, Any], spec: Architecture, report: Report) -> None:
    """Report keys that transformers leaves out where they have its default: engines have other defaults."""
    for section in filter(None, (spec.text_config, spec.vision_config)):
        stated = raw.get(section, {})
        if missing := [key for key in full.get(section, {}) if key not in stated]:
            why = f"{section} lacks {', '.join(missing[:8])}: engines have other defaults than transformers"
            _error(report, section, why, "quantize again: the output states them")


def _check_dtype(raw: Mapping[str, Any], report: Report) -> None:
    """Check both keys: transformers reads `dtype`, older readers `torch_dtype`."""
    for key in ("dtype", "torch_dtype"):
        if key in raw and raw[key] not in DTYPES:
            fix = f"write one of {', '.join(DTYPES)}"
            _error(report, "dtype", f"{key} is {raw[key]!r:.40}: no dtype that an engine runs in", fix)
    stated = {raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) in DTYPES}
    if len(stated) > 1:
        _error(report, "dtype", f"dtype and torch_dtype disagree: {', '.join(sorted(stated))}", "remove torch_dtype")
    if not raw.keys() & {"dtype", "torch_dtype"}:
        why = "dtype is not given: vLLM takes the widest dtype of any tensor, transformers float32"
        _warning(report, "dtype", why, 'write "dtype": "bfloat16"')


def _check_experts(raw: Mapping[str, Any], spec: Architecture, report: Report) -> None:
    for key, (expected, effect) in ENGINE_VIEWS[spec.model_type].stated.items():
        if raw.get(key) != expected:
            stated = f"is {raw[key]!r:.40}" if key in raw else "is missing"
            _error(
                report, key, f"{key} {stated}, {spec.label} has {expected!r}: {effect}", f"write {key}: {expected!r}"
            )
    for key, (meant, effect) in _ALIASES.items():
        if raw.get(key) is not None and raw[key] != raw.get(meant):
            _error(report, key, f"{key} is {raw[key]!r:.40}, but {meant} {raw.get(meant)!r:.40}: {effect}")
    if raw.get("moe_layer_freq", 1) != 1:
        why = f"moe_layer_freq is {raw['moe_layer_freq']!r:.40}: vLLM would build dense layers among those with experts"
        _error(report, "moe_layer_freq", why)
    types = raw.get("mlp_layer_types")
    dense_key = ENGINE_VIEWS[spec.model_type].dense_key
    if dense_key is not None and types is not None and raw.get(dense_key) is None:
        leading = next((i for i, mlp_type in enumerate(types) if mlp_type != "dense"), len(types))
        if leading != _DEFAULT_DENSE or "dense" in types[leading:]:
            why = f"{dense_key} is missing: vLLM takes {_DEFAULT_DENSE} and reads no mlp_layer_types"
            _error(report, dense_key, why, f"write {dense_key}: {leading}")


def _check_rope(raw: Mapping[str, Any], report: Report) -> None:
    rope = raw.get("rope_parameters") or {}
    if (scaling := raw.get("rope_scaling")) is not None:
        rope_type = (scaling.get("rope_type") or scaling.get("type")) if isinstance(scaling, dict) else None
        named = f" ({'YaRN' if rope_type == 'yarn' else repr(rope_type)[:40]})" if rope_type else ""
        why = f"rope_scaling is present{named}: transformers puts it in the place of rope_parameters"
        _error(report, "rope_scaling", why)
    top, inner = raw.get("rope_theta"), rope.get("rope_theta")
    if top is not None and inner is not None and top != inner:
        why = f"rope_theta is {top!r:.40} outside and {inner!r:.40} inside rope_parameters: readers take either"
        _error(report, "rope_theta", why, "remove the one that is not the source's")
    for where, section in (("", raw), ("rope_parameters.", rope)):
        if section.get("partial_rotary_factor", 1) != 1:
            factor = section["partial_rotary_factor"]
            why = f"{where}partial_rotary_factor is {factor!r:.40}: only a part would be rotated"
            _error(report, "partial_rotary_factor", why)
    for key, parts in (("qk_head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")), ("head_dim", ("qk_rope_head_dim",))):
        expected = sum(raw[size] for size in parts)
        if raw.get(key) is not None and raw[key] != expected:
            why = f"{key} is {raw[key]!r:.40}, {' + '.join(parts)} is {expected}"
            why += ": transformers and vLLM recompute it, others may not"
            _warning(report, key, why, f"write {key}: {expected}")


def _check_end_tokens(raw: Mapping[str, Any], spec: Architecture, report: Report) -> None:
    """Ids that no embedding row stands for; an eos that is no id ends no answer."""
    for key in ("eos_token_id", "pad_token_id", "bos_token_id", *spec.token_keys):
        problem = bad_ids(raw.get(key), raw["vocab_size"], several=key == "eos_token_id")
        if problem:
            _error(report, key, f"{key} {problem}", "restore it from the source's config.json")


def bad_ids(value: object, size: int, several: bool) -> str | None:
    """Describe an invalid token id (or one in a list, if `several`) for a vocabulary of `size`; None if valid."""
    ids = value if several and isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int):
            return f"is {id!r:.40}, no token id"
        if not 0 <= id < size:
            return f"is {id!r:.40}, the vocabulary has {size}"
    return None


def _check_indexer_schedule(raw: Mapping[str, Any], report: Report) -> None:
    """A layer owns no indexer in the engine only if freq/offset/pattern skip it AND indexer_types says "shared"."""
    types, computes = raw.get("indexer_types"), indexer_schedule(dict(raw), raw["num_hidden_layers"])
    if types is None:
        if not all(computes):
            why = "indexer_types is not given: vllm-ascend would build an indexer in every layer and leave it unfilled"
            _warning(report, "indexer_types", why, "write indexer_types into config.json")
        return
    differ = [layer for layer, indexer in enumerate(types) if (indexer == "full") != computes[layer]]
    if differ:
        keys = schedule_keys(dict(raw)) or "the absent index_topk_freq"
        why = f"layers {differ[:8]} have or skip an indexer by indexer_types, but not by {keys}, which vLLM reads"
        fix = "restore indexer_types, index_topk_freq and index_skip_topk_offset from the source's config.json"
        _error(report, "indexer_schedule", f"{why}: their indexers would stay uninitialised", fix)
