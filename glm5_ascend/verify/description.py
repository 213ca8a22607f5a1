"""Checks of quant_model_description.json: the type the engine will choose for each module must be runnable.

Source: vllm-ascend 182b75e and 0.23.0 `quantization/modelslim_config.py`, `ascend_config.py` (behaviour, not code);
SGLang 0.5.23 reads only the types of the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.types import (
    DESCRIPTION_META,
    DESCRIPTION_NAME,
    FLOAT,
    INDEXER_CACHE_SUFFIX,
    INDEXER_CACHE_TYPE,
    QUANTIZED,
    ROT_NAME,
    mixed_types,
    not_runnable,
    type_alias,
)
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.rotation import has_hadamard
from glm5_ascend.model.spec import Linear

_AGAIN = "quantize again, or correct the description"
#: All of them; no engine reads `metadata`.
_META = {
    "version", "group_size", "model_quant_type", "metadata", "optional", "is_rot_used", "fa_quant_type",
    "indexer_quant_type", "kv_cache_type",
}  # fmt: skip
#: Caches whose scales lie in tensors that no GLM-5 checkpoint has: key -> what the engine would look for.
_FOREIGN_CACHES = {"fa_quant_type": "fa_k.scale", "kv_cache_type": "k_proj.kv_cache_scale"}
_EXCLUDE = "exclude the module in the recipe and quantize again"


def check_description(checkpoint: LoadedCheckpoint, report: Report) -> dict[str, str]:
    """Check keys and schemes; return the type of every linear of the model (FLOAT if its key is unusable)."""
    description = checkpoint.description
    if description is None:
        return {}
    _check_keys(checkpoint, description, report)
    schemes: dict[str, str] = {}
    for prefix, weight in checkpoint.config.all_weights():
        if isinstance(weight, Linear):
            module = prefix + weight.name
            scheme = description.get(f"{module}.weight")
            schemes[module] = scheme if isinstance(scheme, str) and scheme in QUANTIZED else FLOAT
            if reason := not_runnable(checkpoint.config.spec, module, weight, schemes[module]):
                _error(report, "not_runnable", f"{schemes[module]}: {reason}", f"{module}.weight", _EXCLUDE)
        elif description.get(key := prefix + weight.tensor_name, FLOAT) in QUANTIZED:
            _error(report, "not_runnable", f"{description[key]}: norms and biases exist in FLOAT only", key)
    _check_siblings(checkpoint, schemes, report)
    _check_queries(checkpoint, schemes, report)
    mtp = checkpoint.config.mtp_prefixes
    quantized_mtp = [module for module, scheme in schemes.items() if scheme != FLOAT and module.startswith(mtp)]
    if quantized_mtp:
        why = f"{len(quantized_mtp)} linears of the MTP layer are quantized"
        fix = "keep the MTP layer FLOAT: drafts lost accuracy upstream (vllm-ascend PR 7139)"
        _warning(report, "mtp_quantized", why, fix, f"{quantized_mtp[0]}.weight")
    _check_meta(description, set(schemes.values()), checkpoint.config, report)
    for scheme in schemes.values():
        report.schemes[scheme] = report.schemes.get(scheme, 0) + 1
    return schemes


def _error(report: Report, id: str, message: str, tensor: str, fix: str = _AGAIN) -> None:
    report.error(f"description.{id}", message, tensor=tensor, file=DESCRIPTION_NAME, fix=fix)


def _warning(report: Report, id: str, message: str, fix: str, tensor: str | None = None) -> None:
    report.warning(f"description.{id}", message, tensor=tensor, file=DESCRIPTION_NAME, fix=fix)


def _check_keys(checkpoint: LoadedCheckpoint, description: dict[str, object], report: Report) -> None:
    """Check for one key per tensor, one type per linear under each of its names, and no other key."""
    here = checkpoint.entries.keys() | checkpoint.unreadable
    linears = (key.removesuffix(".weight") for key in description if key.endswith(".weight"))
    aliases = {
        f"{alias}.weight": f"{name}.weight" for name in linears if (alias := type_alias(checkpoint.config.spec, name))
    }
    for key, scheme in description.items():
        if key in _META or key.endswith(INDEXER_CACHE_SUFFIX):
            continue  # _check_meta
        if not isinstance(scheme, str) or scheme not in (FLOAT, *QUANTIZED):
            types = ", ".join((FLOAT, *QUANTIZED))
            _error(report, "unknown_type", f"type {scheme!r:.60} is unknown; known: {types}", key)
        elif key == ROT_NAME:
            _warning(report, "rot_listed", f"{ROT_NAME} has no type and should not be listed", "remove the key", key)
        elif key in aliases and key not in here:
            if scheme != (stated := description[aliases[key]]):
                _error(report, "mixed_types", f"{scheme}, but {aliases[key]} is {stated}: SGLang reads this key", key)
        elif key not in here:
            report.error(
                "description.no_tensor", f"described as {scheme}, but no shard holds it", tensor=key, fix=_AGAIN
            )
        else:
            linear = description.get(key.rpartition(".")[0] + ".weight", scheme)
            if scheme != linear and not key.endswith(".e_score_correction_bias"):
                _error(report, "mixed_types", f"{scheme}, but the weight of the same module is {linear}", key)
    for name in sorted(here - description.keys() - {ROT_NAME}):
        why = "the engine stops with a bare KeyError, or takes the module for quantized"
        if name.endswith(".k_norm.bias"):
            why = "its presence makes vllm-ascend create the norm biases that MLAPO reads"
        _error(report, "key_missing", f"no key for this tensor: {why}", name)


def _check_siblings(checkpoint: LoadedCheckpoint, schemes: dict[str, str], report: Report) -> None:
    """Check that fused modules have one type; of the experts the engine reads only the keys of expert 0."""
    description = checkpoint.description or {}
    # Missing and unknown keys are reported elsewhere.
    stated = {m: scheme for m, scheme in schemes.items() if description.get(f"{m}.weight") in (FLOAT, *QUANTIZED)}
    for module, other in mixed_types(checkpoint.config, stated):
        why = f"{schemes[module]}, but {other} is {schemes[other]}: the engine fuses them into one module"
        _error(report, "siblings", why, f"{module}.weight", "give all of them one type")


def _check_queries(checkpoint: LoadedCheckpoint, schemes: dict[str, str], report: Report) -> None:
    """Check both query projections: one operator takes the second for the type of the first."""
    config = checkpoint.config
    for layer in range(config.num_layers_with_mtp):
        first, second = (config.spec.layer_prefix(layer) + name for name in config.engines.query_projections)
        if first in schemes and (schemes[first] == FLOAT) != (schemes[second] == FLOAT):
            where = "of decode nodes (PD) " if schemes[first] == FLOAT else ""
            why = f"{schemes[second]}, but q_a_proj is {schemes[first]}: vllm-ascend 0.30 {where}reads it as that type"
            fix = "make both FLOAT, or neither, in the recipe and quantize again"
            _warning(report, "queries", why, fix, f"{second}.weight")


def _key_error(report: Report, key: str, message: str, fix: str = _AGAIN) -> None:
    report.error(f"description.{key}", f"{key} {message}", file=DESCRIPTION_NAME, fix=fix)


def _check_meta(description: Mapping[str, object], types: Collection[str], config: ModelConfig, report: Report) -> None:
    """Check the keys that are not tensors; `types` are those of the linears."""
    for key, why in (
        ("version", "vllm-ascend 0.23 would expect unpacked INT4"),
        ("group_size", "vllm-ascend 0.23 reads an absent key as 256, newer ones refuse anything but 0"),
    ):
        expected, value = DESCRIPTION_META[key], description.get(key)
        if type(value) is not type(expected) or value != expected:
            stated = f"{value!r:.60}" if key in description else "missing"
            _key_error(report, key, f"is {stated}, expected {expected!r}: {why}", f"set {key} to {expected!r}")
    for key, value_type, form in (
        ("is_rot_used", bool, "true or false"),
        ("optional", dict, "an object"),
        ("metadata", dict, "an object"),
    ):
        if not isinstance(description.get(key, value_type()), value_type):
            _key_error(report, key, f"is {description[key]!r:.60}, expected {form}")
    _check_model_type(description, types, report)
    _check_caches(description, config, report)


def _check_model_type(description: Mapping[str, object], types: Collection[str], report: Report) -> None:
    """Check model_quant_type: the 310P loader of vllm-ascend and MindIE read it, others the types of the tensors."""
    stated, here = description.get("model_quant_type"), sorted(set(types) - {FLOAT}) or [FLOAT]
    if "model_quant_type" not in description:
        why = "model_quant_type is missing: readers of this key take the model for FLOAT"
        _warning(report, "model_quant_type", why, f"set it to one of the linears' types: {', '.join(here)}")
    elif types and stated not in here:
        why = f"is {stated!r:.60}, but the linears are {', '.join(here)}: of another checkpoint"
        _key_error(report, "model_quant_type", why)


def _check_caches(description: Mapping[str, object], config: ModelConfig, report: Report) -> None:
    for key, tensors in _FOREIGN_CACHES.items():
        if key in description:
            why = (
                f"is {description[key]!r:.60}: the engine would build a cache for {tensors}, which GLM-5 does not have"
            )
            _key_error(report, key, why, "remove the key")
    marked = [key for key in description if key.endswith(INDEXER_CACHE_SUFFIX)]
    for key in marked:
        _check_layer(config, key, description[key], report)
    key = "indexer_quant_type"
    if key in description and description[key] != INDEXER_CACHE_TYPE:
        _key_error(report, key, f"is {description[key]!r:.60}, expected {INDEXER_CACHE_TYPE!r}: no engine knows it")
    elif key in description and not marked:
        why = f"{key} is given, but no layer has {INDEXER_CACHE_SUFFIX[1:]}: the engine chooses the layers by itself"
        _warning(report, key, why, "quantize again, or remove the key")
    elif marked and not has_hadamard(config.index_head_dim):
        why = f"is given, but no Hadamard matrix has index_head_dim {config.index_head_dim} rows to rotate the keys by"
        _key_error(report, key, why, "quantize again without the step fa3_quant")
    elif marked and key not in description:
        _key_error(report, key, f"is missing, but {marked[0]} is there: the engine would not build its INT8 cache")


def _check_layer(config: ModelConfig, key: str, scheme: object, report: Report) -> None:
    """Check the cache key of a layer: if any layer has one, a cache is INT8 only where its key has the right value."""
    layers = (layer for layer in range(config.num_layers_with_mtp) if config.has_indexer(layer))
    if key.removesuffix(INDEXER_CACHE_SUFFIX) not in (
        f"{config.spec.layer_prefix(layer)}self_attn" for layer in layers
    ):
        problem = "this layer has none"
    elif scheme != INDEXER_CACHE_TYPE:
        problem = f"{scheme!r:.60}, expected {INDEXER_CACHE_TYPE!r}"
    else:
        return
    _error(report, "cache", f"cache type of an indexer: {problem}", key)
