"""config.json of a folder, read and checked; a folder of weights that are not read here is named. Imports no torch.

Every command that takes a checkpoint asks here, so that all of them say the same line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError, ConfigError, Glm5Error, shown
from glm5_ascend.files.untrusted import MAX_CONFIG_BYTES, read_json_object
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_json import language_keys, spec_of
from glm5_ascend.model.config_values import checked_config

#: Types of each tensor of a checkpoint in msModelSlim's format; engines open this name only.
DESCRIPTION = "quant_model_description.json"
ORIGINAL = "take the model's bf16, fp16 or FP8 checkpoint"
_GIVE = "give the directory of a GLM-5 checkpoint"
#: Keys of bitsandbytes; its first versions wrote no `quant_method`.
_BITSANDBYTES = {"load_in_4bit", "load_in_8bit"}
#: FP8 weights with one scale for each block, row or tensor: read here.
_FP8 = ("fp8", "fbgemm_fp8", "modelopt_fp8", "deepseek_fp8")
#: Files of a folder without config.json -> what it is, and what to do.
_OTHER_FILES = (
    ("*.gguf", "GGUF, the format of llama.cpp", ORIGINAL),
    ("*.nemo", "a NeMo checkpoint", "convert it to a Hugging Face checkpoint"),
    ("params.json", "a checkpoint in Mistral's or Meta's own format", "convert it to a Hugging Face checkpoint"),
    ("*.distcp", "a distributed checkpoint of a training run", "export it as a Hugging Face checkpoint"),
    ("latest_checkpointed_iteration.txt", "a Megatron checkpoint", "export it as a Hugging Face checkpoint"),
)
#: Weights that are not in .safetensors, beside a config.json -> what they are, and what to do.
_OTHER_WEIGHTS = (
    ("*.gguf", "GGUF, the format of llama.cpp", ORIGINAL),
    ("*.bin", "pickles, which can run code and are never opened", "save it with safetensors, or take the original"),
    ("*.pt*", "pickles, which can run code and are never opened", "save it with safetensors, or take the original"),
    ("*.ckpt", "a MindSpore or Lightning checkpoint", "export it as a Hugging Face checkpoint"),
    ("*.onnx", "an ONNX model", ORIGINAL),
    ("*.distcp", "a distributed checkpoint of a training run", "export it as a Hugging Face checkpoint"),
)


#: Files in which other quantizers describe their weights -> the key that holds it; "" for the whole file.
_QUANTIZER_FILES = {"hf_quant_config.json": "quantization", "quantize_config.json": "", "quant_config.json": ""}


def load_config(directory: Path) -> ModelConfig:
    """Read and check `directory/config.json`.

    Raises:
        ConfigError: no such directory or file, not JSON, another architecture, a missing or impossible value.
    """
    return parse_config(read_config(directory), directory / "config.json")


def parse_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """`load_config` of a dictionary."""
    spec, keys = language_keys(raw, path)
    return checked_config(keys, spec, path)


def read_config(directory: Path, *, error: type[Glm5Error] = ConfigError) -> dict[str, Any]:
    """Return the keys of `directory/config.json` unchanged.

    Raises:
        ConfigError: no such directory or file. error: not valid JSON.
        CheckpointError: weights in a format that is not read here.
    """
    _check_path(directory)
    raw = read_json_object(
        directory / "config.json", max_bytes=MAX_CONFIG_BYTES, error=error, fix="download the file again"
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
    for pattern, what, fix in _OTHER_FILES:
        if file := next(iter(sorted(directory.glob(pattern))), None):
            raise ConfigError(f"{directory}: {what} ({file.name}), and no config.json", fix)
    inside = sorted(
        path.parent for path in (*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json"))
    )
    tip = f"{_GIVE}: {inside[0]}" if inside else f"{_GIVE} (it holds config.json)"
    raise ConfigError(f"{directory / 'config.json'}: not found", tip)


def _adapter(directory: Path) -> Glm5Error:
    content = read_json_object(directory / "adapter_config.json", max_bytes=MAX_CONFIG_BYTES, error=ConfigError)
    peft_type, base = content.get("peft_type", "LoRA"), content.get("base_model_name_or_path")
    of = f" for {shown(base)}" if base else ""
    return ConfigError(
        f"{directory}: a PEFT adapter ({shown(peft_type)}){of}, without the model's weights",
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
    files = {
        file: read_json_object(directory / file, max_bytes=MAX_CONFIG_BYTES)
        for file in _QUANTIZER_FILES
        if (directory / file).exists()
    }
    for by, where in _quantizations(raw, files):
        raise CheckpointError(f"{directory}: quantized already: {by} ({where})", ORIGINAL)
    if not any(path.name != "adapter_model.safetensors" for path in directory.glob("*.safetensors")):
        if (directory / "adapter_config.json").exists():
            raise _adapter(directory)
        for pattern, what, fix in _OTHER_WEIGHTS:
            if file := next(iter(sorted(directory.glob(pattern))), None):
                raise CheckpointError(f"{directory}: {what} ({file.name})", fix)


def _quantizations(raw: Mapping[str, Any], files: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(name, file and key) of each quantization that is not read here."""
    inner = raw.get("text_config")
    for prefix, section in (("", raw), ("text_config.", inner if isinstance(inner, dict) else {})):
        for key in ("quantization_config", "compression_config"):
            value = section.get(key)
            if isinstance(value, dict) and (name := quantization_name(value, mlx="quantization" in section)):
                yield name, f"config.json: {prefix}{key}"
        value = section.get("quantization")
        if isinstance(value, dict) and "bits" in value:
            yield f"MLX, {shown(value['bits'])} bits", f"config.json: {prefix}quantization"
        if isinstance(section.get("quantize"), str):
            yield f"msModelSlim for MindIE ({shown(section['quantize'])})", f"config.json: {prefix}quantize"
    for file, content in files.items():
        key = _QUANTIZER_FILES[file]
        value = content.get(key) if key else content
        if not isinstance(value, dict):
            continue
        if key:
            by = quantization_name({"quant_method": "modelopt"} | value) if value.get("quant_algo") else None
        else:
            by = quantization_name(value) if value.get("quant_method") else _bits("AWQ or GPTQ", value)
        if by:
            yield by, f"{file}{': ' + key if key else ''}"


def quantization_name(value: Mapping[str, Any], mlx: bool = False) -> str | None:
    """Name the quantization of a `quantization_config`; None for FP8 weights with their scales, which are read.

    Args:
        mlx: config.json has MLX's own key `quantization` as well.
    """
    default = (
        "bitsandbytes" if _BITSANDBYTES & value.keys() else "fp8" if "bits" not in value else "mlx" if mlx else None
    )
    method = value.get("quant_method", default)
    if is_fp8(value):
        return None
    if method == "mlx":
        return _bits("MLX", value)
    name = shown(method) if isinstance(method, str) else "a format without quant_method"
    algorithm = value.get("quant_algo") or value.get("format") or _weight_type(value)
    if isinstance(algorithm, str) and algorithm:
        return f"{algorithm[:60]} by {name}"
    return _bits(name, value)


def _weight_type(value: Mapping[str, Any]) -> str | None:
    """Type of the weights in AMD Quark's `global_quant_config`: MXFP4 is fp4 in groups of 32."""
    every: Any = value.get("global_quant_config")
    weight: Any = every.get("weight") if isinstance(every, dict) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    dtype = weight.get("dtype") if isinstance(weight, dict) else None
    if not isinstance(dtype, str):
        return None
    return "MXFP4" if dtype == "fp4" and weight.get("group_size") == 32 else dtype


def _bits(name: str, value: Mapping[str, Any]) -> str:
    bits = value.get("bits", value.get("w_bit"))
    return name if bits is None else f"{name}, {shown(bits)} bits"


def is_fp8(value: Mapping[str, Any]) -> bool:
    """True for FP8 (e4m3) weights with plain scales: of blocks, rows or whole tensors.

    The one way of llm-compressor: every group has `num_bits` 8 and `type` float. ModelOpt's algorithms begin with FP8.
    """
    method = value.get("quant_method", None if {"bits", *_BITSANDBYTES} & value.keys() else "fp8")
    if method == "compressed-tensors":
        groups = value.get("config_groups")
        weights = (
            [group.get("weights") for group in groups.values()]
            if isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())
            else []
        )
        return bool(weights) and all(
            isinstance(weight, dict)
            and weight.get("num_bits") == 8
            and weight.get("type") == "float"
            and weight.get("strategy") in ("channel", "tensor", "block")
            for weight in weights
        )
    if method in ("modelopt", "modelopt_mixed"):
        algorithm = value.get("quant_algo")
        return isinstance(algorithm, str) and algorithm.startswith("FP8")
    return method in _FP8
