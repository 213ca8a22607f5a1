"""config.json of a folder, read and checked; a folder of weights that are not read here is named. Imports no torch.

Every command that takes a checkpoint asks here, so that all of them say the same line. GLM-5.3-Flash keeps the language
model's keys in `text_config` and the vision tower's in `vision_config`; transformers leaves out keys that have its
defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError, ConfigError, Glm5Error, shown
from glm5_ascend.files.untrusted import MAX_CONFIG_BYTES, read_json_object
from glm5_ascend.model.config import SPECS, ModelConfig
from glm5_ascend.model.config_values import checked_config, schedule_keys
from glm5_ascend.model.spec import Architecture

#: Types of each tensor of a checkpoint in msModelSlim's format; engines open this name only.
DESCRIPTION = "quant_model_description.json"
ORIGINAL = "take the model's bf16, fp16 or FP8 checkpoint"
_GIVE = "give the directory of a GLM-5 checkpoint"
#: FP8 weights with one scale for each block or row: read here.
_FP8 = ("fp8", "fbgemm_fp8")
#: Where ModelOpt describes the weights.
_MODELOPT = "hf_quant_config.json"
_GGUF = "GGUF, the format of llama.cpp"
_PICKLES = "pickles, which can run code and are never opened"
#: What a GLM-5 may be named besides, and the way out.
_OTHER_NAMES = {
    "deepseek_v32": "is it a GLM-5 whose config.json was patched for an engine without glm_moe_dsa? Then restore the "
    "original config.json",
    "glm_moe_dsa_mtp": "the MTP layer alone: give the whole model, engines take the draft from its last layer",
}


def load_config(directory: Path) -> ModelConfig:
    """Read and check `directory/config.json`.

    Raises:
        ConfigError: no such directory or file, not JSON, another architecture, a missing or impossible value.
    """
    return parse_config(read_config(directory), directory / "config.json")


def parse_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """`load_config` of a dictionary."""
    spec = _check_architecture(raw, path)
    _check_objects(raw, spec, path)
    return checked_config(flat_keys(completed(raw)), spec, path)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the keys of `directory/config.json` unchanged.

    Raises:
        ConfigError: no such directory or file, or not valid JSON.
        CheckpointError: weights in a format that is not read here.
    """
    _check_path(directory)
    raw = read_json_object(
        directory / "config.json", max_bytes=MAX_CONFIG_BYTES, error=ConfigError, fix="download the file again"
    )
    # In msModelSlim's format a folder may hold anything else; a broken link to its description is a finding of verify.
    if spec_of(raw) is not None and not os.path.lexists(directory / DESCRIPTION):
        _refuse_other_formats(directory, raw)
    return raw


def _check_path(directory: Path) -> None:
    if directory.is_file():
        what = "a GGUF file, the format of llama.cpp" if directory.suffix.lower() == ".gguf" else "a file"
        raise ConfigError(f"{directory}: {what}, not a directory", _GIVE)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory", _GIVE)
    if (directory / "config.json").exists():
        return
    if (directory / "adapter_config.json").exists():
        raise _adapter(directory)
    if file := next(directory.glob("*.gguf"), None):
        raise ConfigError(f"{directory}: {_GGUF} ({file.name}), and no config.json", ORIGINAL)
    inside = sorted(
        path.parent for path in (*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json"))
    )
    tip = f"{_GIVE}: {inside[0]}" if inside else f"{_GIVE} (it holds config.json)"
    raise ConfigError(f"{directory / 'config.json'}: not found", tip)


def _adapter(directory: Path) -> Glm5Error:
    return ConfigError(
        f"{directory}: a PEFT adapter without the model's weights",
        "merge it into its base model (PEFT: merge_and_unload), then give the merged checkpoint",
    )


def _refuse_other_formats(directory: Path, raw: Mapping[str, Any]) -> None:
    """Name weights in a format that nothing here reads: by whom, by which key, the way out."""
    described = sorted(path.name for path in directory.glob("quant_model_description*.json"))
    if described:
        raise CheckpointError(
            f"{directory}: quantized already, by msModelSlim under its earlier file names ({described[0]}); engines "
            f"open {DESCRIPTION} only",
            f"rename {described[0]} to {DESCRIPTION} and its index to model.safetensors.index.json, then run "
            "glm5-ascend verify; to quantize, take the bf16, fp16 or FP8 checkpoint",
        )
    for by, where in _quantizations(raw, directory):
        raise CheckpointError(f"{directory}: quantized already: {by} ({where})", ORIGINAL)
    if not any(path.name != "adapter_model.safetensors" for path in directory.glob("*.safetensors")):
        if (directory / "adapter_config.json").exists():
            raise _adapter(directory)
        for pattern, what in (("*.gguf", _GGUF), ("*.bin", _PICKLES), ("*.pt*", _PICKLES)):
            if file := next(directory.glob(pattern), None):
                raise CheckpointError(f"{directory}: {what} ({file.name})", f"{ORIGINAL} in .safetensors")


def _quantizations(raw: Mapping[str, Any], directory: Path) -> Iterator[tuple[str, str]]:
    """(name, file and key) of each quantization that is not read here."""
    inner = raw.get("text_config")
    for prefix, section in (("", raw), ("text_config.", inner if isinstance(inner, dict) else {})):
        value = section.get("quantization")
        if isinstance(value, dict) and "bits" in value:
            yield f"MLX, {shown(value['bits'])} bits", f"config.json: {prefix}quantization"
        for key in ("quantization_config", "compression_config"):
            value = section.get(key)
            if isinstance(value, dict) and (name := quantization_name(value)):
                yield name, f"config.json: {prefix}{key}"
        if isinstance(section.get("quantize"), str):
            yield f"msModelSlim for MindIE ({shown(section['quantize'])})", f"config.json: {prefix}quantize"
    if (directory / _MODELOPT).exists():
        value = read_json_object(directory / _MODELOPT, max_bytes=MAX_CONFIG_BYTES).get("quantization")
        if isinstance(value, dict) and (name := quantization_name({"quant_method": "modelopt"} | value)):
            yield name, _MODELOPT


def quantization_name(value: Mapping[str, Any]) -> str | None:
    """Name the quantization of a `quantization_config`; None for FP8 weights with their scales, which are read."""
    if _is_fp8(value):
        return None
    method = value.get("quant_method")
    name = shown(method) if isinstance(method, str) else "a format without quant_method"
    if isinstance(algorithm := value.get("quant_algo") or value.get("format"), str):
        return f"{algorithm[:60]} by {name}"
    return f"{name}, {shown(value['bits'])} bits" if "bits" in value else name


def _is_fp8(value: Mapping[str, Any]) -> bool:
    """True for FP8 (e4m3) weights with plain scales: of blocks, rows or whole tensors."""
    match value.get("quant_method"):
        case None:
            return "weight_block_size" in value
        case "compressed-tensors":
            return value.get("format") == "float-quantized"
        case "modelopt":
            return str(value.get("quant_algo")).startswith("FP8")
        case method:
            return method in _FP8


def _check_architecture(raw: dict[str, Any], path: Path) -> Architecture:
    if (spec := spec_of(raw)) is not None:
        return spec
    model_type = raw.get("model_type")
    tip = _OTHER_NAMES.get(model_type if isinstance(model_type, str) else "", "give a GLM-5 checkpoint")
    raise ConfigError(f"{path}: model_type is {shown(model_type)}, expected {' or '.join(map(repr, SPECS))}", tip)


def flat_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model, wherever config.json has them; `model_type` is that of the whole file.

    For a spec with a `text_config` its keys stand beside the outer ones, and those of the spec's groups by themselves.
    """
    spec = spec_of(raw)
    if spec is None or spec.text_config is None:
        return dict(raw)
    inner = raw.get(spec.text_config)
    keys = {**raw, **(inner if isinstance(inner, dict) else {}), "model_type": raw["model_type"]}
    keys = {key: value for key, value in keys.items() if key != spec.text_config}
    if "architectures" in raw:
        keys["architectures"] = raw["architectures"]
    for group, names in spec.groups.items():
        if isinstance(group_keys := keys.get(group), dict):
            keys |= {outside: group_keys[inside] for inside, outside in names.items() if inside in group_keys}
    return keys


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the defaults of its spec where it leaves keys out; transformers saves what differs only.

    The language model's go into `text_config`, the tower's into `vision_config`.
    """
    spec = spec_of(raw)
    if spec is None or spec.text_config is None or spec.vision_config is None:
        return dict(raw)
    full = dict(raw)
    language = flat_keys(raw)
    for outer, defaults in ((spec.text_config, spec.defaults), (spec.vision_config, spec.vision_defaults)):
        inner = full.get(outer)
        keys = language if outer == spec.text_config else inner
        if isinstance(inner, dict) and isinstance(keys, dict):
            missing = {key: value for key, value in defaults.items() if key not in keys}
            full[outer] = inner | missing if missing else inner
    return full


def served_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a source's config.json without its quantization: with it vLLM would not open the description.

    Keys that it leaves out because they have transformers' default are stated: other engines have other defaults.
    Shared indexers that only `indexer_types` names, which transformers reads, are stated in vLLM's key as well.
    """
    keys = ("quantization_config", "compression_config")
    config = {key: value for key, value in completed(raw).items() if key not in keys}
    if isinstance(inner := config.get("text_config"), dict):
        config["text_config"] = {key: value for key, value in inner.items() if key not in keys}
    types = config.get("indexer_types")
    if isinstance(types, list) and "shared" in types and not schedule_keys(config):
        config["index_topk_pattern"] = "".join("S" if indexer == "shared" else "F" for indexer in types)
    return config


def spec_of(raw: Mapping[str, Any]) -> Architecture | None:
    model_type = raw.get("model_type")
    return SPECS.get(model_type) if isinstance(model_type, str) else None


def _check_objects(raw: Mapping[str, Any], spec: Architecture, path: Path) -> None:
    """Raise `ConfigError` where config.json lacks an object of the architecture, or has that of another one."""
    for key, suffix in ((spec.text_config, "text"), (spec.vision_config, "vision")):
        if key is None:
            continue
        fix = "use the config.json of the original checkpoint"
        inner, model_type = raw.get(key), f"{spec.model_type}_{suffix}"
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {key} is {shown(inner)}, expected an object: {spec.label} has one", fix)
        if inner.get("model_type", model_type) != model_type:
            raise ConfigError(f"{path}: {key}.model_type is {shown(inner['model_type'])}, expected {model_type!r}", fix)
