"""Checks of quant_model_description.json: the type the engine will choose for each module must be runnable.

Source: vllm-ascend 182b75e and 0.23.0 `quantization/modelslim_config.py` (behaviour, not code).
"""

from __future__ import annotations

from collections import Counter

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME, FLOAT, QUANTIZED, W4A8_DYNAMIC, W8A8
from glm5_ascend.checkpoint.types import INDEXER_CACHE_SUFFIX, ROT_NAME
from glm5_ascend.model.spec import Linear
from glm5_ascend.verify.description_meta import META, check_meta

_AGAIN = "quantize again, or correct the description"


def check_description(checkpoint: LoadedCheckpoint, report: Report) -> dict[str, str]:
    """Check keys and schemes; return the type of every linear of the model (FLOAT if its key is unusable)."""
    description = checkpoint.description
    if description is None:
        return {}
    _check_keys(checkpoint, description, report)
    schemes: dict[str, str] = {}
    for prefix, part in checkpoint.config.all_weights():
        if isinstance(part, Linear):
            module = prefix + part.name
            scheme = description.get(f"{module}.weight")
            schemes[module] = scheme if isinstance(scheme, str) and scheme in QUANTIZED else FLOAT
            _check_runnable(checkpoint, module, part, schemes[module], report)
        elif description.get(key := prefix + part.tensor_name, FLOAT) in QUANTIZED:
            report.error(
                "description.not_runnable",
                f"{description[key]}: norms and biases exist in FLOAT only",
                tensor=key,
                file=DESCRIPTION_NAME,
                fix=_AGAIN,
            )
    _check_siblings(checkpoint, schemes, report)
    _check_queries(checkpoint, schemes, report)
    quantized_mtp = [
        module
        for layer in range(checkpoint.config.num_hidden_layers, checkpoint.config.num_layers_with_mtp)
        for module in schemes
        if schemes[module] != FLOAT and module.startswith(checkpoint.config.spec.layer_prefix(layer))
    ]
    if quantized_mtp:
        report.warning(
            "description.mtp_quantized",
            f"{len(quantized_mtp)} linears of the MTP layer are quantized",
            tensor=f"{quantized_mtp[0]}.weight",
            file=DESCRIPTION_NAME,
            fix="keep the MTP layer FLOAT: drafts lost accuracy upstream (vllm-ascend PR 7139)",
        )
    check_meta(description, set(schemes.values()), checkpoint.config, report)
    for scheme in schemes.values():
        report.schemes[scheme] = report.schemes.get(scheme, 0) + 1
    return schemes


def _check_keys(checkpoint: LoadedCheckpoint, description: dict[str, object], report: Report) -> None:
    """Check for one key per tensor, one type per linear, and no other key."""
    here = checkpoint.entries.keys() | checkpoint.unreadable
    for key, scheme in description.items():
        if key in META or key.endswith(INDEXER_CACHE_SUFFIX):
            continue  # check_meta
        if not isinstance(scheme, str) or scheme not in (FLOAT, *QUANTIZED):
            report.error(
                "description.unknown_type",
                f"type {scheme!r:.60} is unknown; known: FLOAT, {', '.join(QUANTIZED)}",
                tensor=key,
                file=DESCRIPTION_NAME,
                fix=_AGAIN,
            )
        elif key == ROT_NAME:
            report.warning(
                "description.rot_listed",
                f"{ROT_NAME} has no type and should not be listed",
                tensor=key,
                file=DESCRIPTION_NAME,
                fix="remove the key",
            )
        elif key not in here:
            report.error(
                "description.no_tensor", f"described as {scheme}, but no shard holds it", tensor=key, fix=_AGAIN
            )
        else:
            linear = description.get(key.rpartition(".")[0] + ".weight", scheme)
            if scheme != linear and not key.endswith(".e_score_correction_bias"):
                report.error(
                    "description.mixed_types",
                    f"{scheme}, but the weight of the same module is {linear}",
                    tensor=key,
                    file=DESCRIPTION_NAME,
                    fix=_AGAIN,
                )
    for name in sorted(here - description.keys() - {ROT_NAME}):
        why = "the engine stops with a bare KeyError, or takes the module for quantized"
        if name.endswith(".k_norm.bias"):
            why = "its presence makes vllm-ascend create the norm biases that MLAPO reads"
        report.error(
            "description.key_missing", f"no key for this tensor: {why}", tensor=name, file=DESCRIPTION_NAME, fix=_AGAIN
        )


def _check_runnable(checkpoint: LoadedCheckpoint, module: str, part: Linear, scheme: str, report: Report) -> None:
    routed = checkpoint.config.spec.is_routed(module)
    reason = None
    if scheme != FLOAT and part.name in checkpoint.config.spec.always_float:
        reason = "the engine can run this module in FLOAT only"
    elif scheme == W4A8_DYNAMIC and not routed:
        reason = "W4A8_DYNAMIC exists for routed experts only"
    elif scheme == W8A8 and routed:
        reason = "static W8A8 does not exist for routed experts"
    if reason:
        report.error(
            "description.not_runnable",
            f"{scheme}: {reason}",
            tensor=f"{module}.weight",
            file=DESCRIPTION_NAME,
            fix="exclude the module in the recipe and quantize again",
        )


def _check_siblings(checkpoint: LoadedCheckpoint, schemes: dict[str, str], report: Report) -> None:
    """Check that fused modules have one type; of the experts the engine reads only the keys of expert 0."""
    config, description = checkpoint.config, checkpoint.description or {}
    for layer in range(config.num_layers_with_mtp):
        for group in config.fused_groups(layer):
            # Missing and unknown keys are reported elsewhere.
            stated = [module for module in group if description.get(f"{module}.weight") in (FLOAT, *QUANTIZED)]
            if not stated:
                continue
            usual = Counter(schemes[module] for module in stated).most_common(1)[0][0]
            example = next(module for module in stated if schemes[module] == usual)
            for module in stated:
                if schemes[module] != usual:
                    report.error(
                        "description.siblings",
                        f"{schemes[module]}, but {example} is {usual}: the engine fuses them into one module",
                        tensor=f"{module}.weight",
                        file=DESCRIPTION_NAME,
                        fix="give all of them one type",
                    )


def _check_queries(checkpoint: LoadedCheckpoint, schemes: dict[str, str], report: Report) -> None:
    """Check both query projections: one operator takes the second for the type of the first."""
    config = checkpoint.config
    for layer in range(config.num_layers_with_mtp):
        first, second = (
            checkpoint.config.spec.layer_prefix(layer) + name for name in checkpoint.config.spec.query_projections
        )
        if (schemes[first] == FLOAT) != (schemes[second] == FLOAT):
            where = "of decode nodes (PD) " if schemes[first] == FLOAT else ""
            report.warning(
                "description.queries",
                f"{schemes[second]}, but q_a_proj is {schemes[first]}: vllm-ascend 0.30 {where}reads it as that type",
                tensor=f"{second}.weight",
                file=DESCRIPTION_NAME,
                fix="make both FLOAT, or neither, in the recipe and quantize again",
            )
