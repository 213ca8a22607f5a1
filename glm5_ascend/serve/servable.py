"""Checks of a checkpoint directory before vLLM loads it: vLLM misreads many defects without a message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.summary import CheckpointSummary, summarize
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError, ConfigError, shown
from glm5_ascend.model.config_file import check_architecture, indexer_schedule
from glm5_ascend.serve.plugin.description import QuantDescription, check_group_size

#: Keys of config.json for which vLLM's default differs from GLM-5's value.
REQUIRED_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True}
#: Keys from which vLLM derives the layers without an indexer.
VLLM_INDEXER_KEYS = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def check_directory(directory: Path) -> CheckpointSummary:
    """Check config.json, the description and the shards' headers of a checkpoint, and summarize it. Reads no tensor.

    Raises:
        ConfigError: vLLM would refuse config.json, or compute another model by it.
        CheckpointError: no weights; shards that are missing or damaged; a description that is damaged or inconsistent.
    """
    from glm5_ascend.checkpoint.index import CheckpointDir  # imports torch, which a wrong directory does not need

    checkpoint = summarize(directory, error=ConfigError)
    check_config(checkpoint.config, directory / "config.json")
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} has no .safetensors file", "the weights are missing: copy them")
    CheckpointDir(directory)
    path = directory / DESCRIPTION_NAME
    if path.exists():
        if "quantization_config" in checkpoint.config:
            raise ConfigError(
                f"{directory / 'config.json'} has quantization_config, so vLLM would never read {DESCRIPTION_NAME}",
                "remove quantization_config from config.json",
            )
        check_group_size(path, checkpoint.group_size)
        QuantDescription(path, checkpoint.types, is_rot_used=False).check()
    return checkpoint


def check_config(config: dict[str, Any], path: Path) -> None:
    """Raise `ConfigError` for a config.json by which vLLM would not compute GLM-5."""
    check_architecture(config, path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or "GlmMoeDsaForCausalLM" not in architectures:
        raise ConfigError(
            f"{path}: architectures is {shown(architectures)}; vLLM would serve embeddings, not text",
            'restore config.json from the source checkpoint, or add {"architectures": ["GlmMoeDsaForCausalLM"]}',
        )
    for key, value in REQUIRED_KEYS.items():
        if config.get(key) != value:
            raise ConfigError(
                f"{path}: {key} is {shown(config.get(key))}; vLLM would not compute GLM-5 without {value!r}",
                f"restore config.json from the source checkpoint, or add {json.dumps({key: value})}",
            )
    if config.get("indexer_types") is not None and "num_hidden_layers" not in config:
        raise ConfigError(f"{path}: num_hidden_layers is missing", "restore config.json from the source checkpoint")
    topk_pattern(config)


def topk_pattern(config: dict[str, Any]) -> str | None:
    """vLLM's `index_topk_pattern` for transformers' `indexer_types`: F = layer with an indexer, S = without (GLM-5.2).

    Args:
        config: config.json, or a transformers config's `to_dict()`.
    Returns:
        None without `indexer_types`: then vLLM derives the layers itself.
    Raises:
        ConfigError: the keys that vLLM reads contradict `indexer_types`.
    """
    types = config.get("indexer_types")
    if types is None:
        return None
    layers = config["num_hidden_layers"]
    pattern = "".join("S" if layer_type == "shared" else "F" for layer_type in types[:layers])
    keys = {key: config[key] for key in VLLM_INDEXER_KEYS if config.get(key) is not None}
    vllm_pattern = "".join("F" if has_indexer else "S" for has_indexer in indexer_schedule(config, layers))
    if keys and vllm_pattern != pattern:
        layer = next(i for i, (a, b) in enumerate(zip(pattern, vllm_pattern, strict=False)) if a != b)
        raise ConfigError(
            f"config.json: indexer_types has layer {layer} {types[layer]!r}, "
            f"but {', '.join(f'{key}={value}' for key, value in keys.items())} says otherwise",
            "restore config.json from the source checkpoint, or remove the keys that are wrong",
        )
    return pattern
