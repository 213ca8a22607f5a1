"""`verify --engine NAME`: how one engine would load a checkpoint, each statement with the source line.

All other checks of `verify` are requirements of vllm-ascend's loader that the others share. Here are the differences.
Source: SGLang 0.5.23, paths below `sglang/srt/`; loaded and computed with in tests/contract, on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from glm5_ascend.checkpoint.checks.report import EngineAnswer, EngineNote
from glm5_ascend.checkpoint.types import (
    DESCRIPTION_NAME,
    FLOAT,
    INDEXER_CACHE_SUFFIX,
    ROT_NAME,
    W4A8_DYNAMIC,
    W8A8_DYNAMIC,
    type_alias,
)
from glm5_ascend.engine_lines import LINES, SGLANG_05

if TYPE_CHECKING:  # it loads torch
    from glm5_ascend.checkpoint.checks.report import Report
    from glm5_ascend.verify.checked import Checked

_MODELSLIM = "layers/quantization/modelslim/modelslim.py"
#: A type of experts that its `get_moe_scheme` has no class for ends the start.
_SGLANG_EXPERTS = (W4A8_DYNAMIC, W8A8_DYNAMIC)


class ServingEngine(StrEnum):
    """Engines that `verify --engine` knows."""

    sglang = "sglang"
    vllm_ascend = "vllm-ascend"
    vllm = "vllm"


#: Version of each engine that this module describes; that of vllm-ascend depends on the model.
VERSIONS = {
    ServingEngine.sglang: f"SGLang {SGLANG_05.tested[0]}",
    ServingEngine.vllm: "vLLM on a CPU, with the plugin of this package",
}


def check_engine(checked: Checked, engine: ServingEngine, report: Report) -> None:
    """Add the engine's errors and answer to the report; call it last."""
    if engine is ServingEngine.sglang:
        _sglang_types(checked, report)
        _sglang_names(checked, report)
        _sglang_config(checked, report)
        notes = _sglang_notes(checked)
    else:
        report.findings = [
            replace(f, level="warning") if f.id == "mtp.rot_file" else f for f in report.findings
        ]  # the index is enough for vLLM
        notes = []
    line = LINES[checked.checkpoint.config.engines.vllm_ascend]
    version = VERSIONS.get(engine, f"vllm-ascend {line.tested[0]}")
    report.engine = EngineAnswer(str(engine), version, report.ok, notes)


def _sglang_types(checked: Checked, report: Report) -> None:
    """Report types that stop the start."""
    checkpoint = checked.checkpoint
    for layer in range(checkpoint.config.num_hidden_layers):
        prefix = checkpoint.config.spec.layer_prefix(layer)
        experts = [prefix + linear.name for linear in checkpoint.config.spec.expert_linears(0)]
        odd = [module for module in experts if checked.schemes.get(module, W4A8_DYNAMIC) not in _SGLANG_EXPERTS]
        if odd:
            report.error(
                "engine.experts",
                f"{checked.schemes[odd[0]]}: SGLang has no class for it and ends with a ValueError ({_MODELSLIM}:430)",
                tensor=f"{odd[0]}.weight",
                file=DESCRIPTION_NAME,
                fix="give these experts W8A8_DYNAMIC in the recipe, the widest type that it runs, and quantize again",
            )


def _sglang_names(checked: Checked, report: Report) -> None:
    """Report types that SGLang does not find, because it drops a part of the names: the start ends at the experts."""
    spec, description = checked.checkpoint.config.spec, checked.checkpoint.description or {}
    aliases = {module: type_alias(spec, module) for module, scheme in checked.schemes.items() if scheme != FLOAT}
    missing = [alias for alias in aliases.values() if alias is not None and f"{alias}.weight" not in description]
    if missing:
        report.error(
            "engine.names",
            f"{len(missing)} types of linears are missing under SGLang's names: it ends with a ValueError "
            f"({_MODELSLIM}:406)",
            tensor=f"{missing[0]}.weight",
            file=DESCRIPTION_NAME,
            fix="quantize again: the description has both names",
        )


def _sglang_config(checked: Checked, report: Report) -> None:
    """Report keys of config.json without which SGLang builds other layers, and integers that end its start."""
    raw, spec = checked.checkpoint.raw, checked.checkpoint.config.spec
    fix = "state it in text_config of the source's config.json, and quantize again"
    for path in checked.checkpoint.config.engines.sglang_keys:
        inside = raw if len(path) == 1 else raw.get(path[0])
        if isinstance(inside, dict) and path[-1] not in inside:
            why = f"{'.'.join(path)} is missing: SGLang has another default than transformers (configs/glm5_next.py)"
            report.error("engine.config", why, file="config.json", fix=fix)
    numbers = {key: raw.get(key) for key in spec.more_numbers} | {
        f"vision_config.{key}": (raw.get("vision_config") or {}).get(key) for key in spec.more_numbers
    }
    for key, value in numbers.items():
        if type(value) is int:
            why = f"{key} is {value}: SGLang's transformers takes {float(value)} only, and the start ends"
            report.error("engine.config", why, file="config.json", fix=fix)


def _sglang_notes(checked: Checked) -> list[EngineNote]:
    checkpoint, notes = checked.checkpoint, []
    config, description = checkpoint.config, checkpoint.description or {}
    main = checkpoint.config.spec.layer_prefix(config.num_hidden_layers)
    experts = {scheme for module, scheme in checked.schemes.items() if config.spec.is_routed(module)}
    if W4A8_DYNAMIC in experts:
        notes.append(
            EngineNote(
                "without EP over all ranks each of them adds the whole scale_bias: wrong results, and no message",
                f"{_MODELSLIM}:424, hardware_backend/npu/quantization/moe_methods.py:795",
                "--moe-a2a-backend deepep, or --ep-size equal to --tp-size",
            )
        )
    drafts = [scheme for module, scheme in checked.schemes.items() if module.startswith(main)]
    if drafts and set(drafts) == {FLOAT}:
        notes.append(
            EngineNote(
                "needed for MTP where --quantization modelslim is given: the draft would inherit it, and its experts "
                "are FLOAT",
                "arg_groups/serving_hook.py:689",
                "--speculative-draft-model-quantization unquant",
            )
        )
    if drafts and ROT_NAME in checkpoint.entries:
        notes.append(
            EngineNote(
                "give the directory, not the name of a hub: the rotation is looked for as a local file, and drafts "
                "without it are guessed worse",
                "models/deepseek_nextn.py:109",
            )
        )
        notes.append(
            EngineNote(
                "drafts use the target's head: in a rotated checkpoint this costs some acceptance, never correctness",
                "models/deepseek_common/deepseek_weight_loader.py:328, speculative/eagle_worker_v2.py:378",
            )
        )
    if any(key.endswith(INDEXER_CACHE_SUFFIX) for key in description):
        notes.append(EngineNote("INT8 indexer caches (C8) are not known: they stay in 16 bits", _MODELSLIM))
    return notes
