"""What a directory must hold before vLLM may load it: vLLM misreads much of the rest without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.summary import CheckpointSummary, summarize
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError, ConfigError, shown
from glm5_ascend.model.config_file import check_architecture, read_config
from glm5_ascend.serve.plugin.description import load_description
from glm5_ascend.serve.schedule import topk_pattern

#: config.json keys that vLLM reads with another default than GLM-5's: without them it computes something else.
REQUIRED_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True}


def check_directory(directory: Path) -> CheckpointSummary:
    """What the checkpoint holds, by its JSON files and the shards' headers; no tensor is read.

    Raises:
        ConfigError: vLLM would refuse config.json, or compute something else than GLM-5 by it.
        CheckpointError: no weights, shards that are missing, cut or no shards, or a description that cannot be read.
    """
    from glm5_ascend.checkpoint.index import CheckpointDir  # imports torch, which nobody needs without a directory

    config = _checked_config(directory)
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} has no .safetensors file", "the weights are missing: copy them")
    CheckpointDir(directory)
    if (directory / DESCRIPTION_NAME).exists():
        if "quantization_config" in config:
            raise ConfigError(
                f"{directory / 'config.json'} has quantization_config, so vLLM would never read {DESCRIPTION_NAME}",
                "remove quantization_config from config.json",
            )
        load_description(directory).check()
    return summarize(directory)


def _checked_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    config = read_config(directory)  # checked before anything is built or looped over by its numbers
    check_architecture(config, path)
    if "GlmMoeDsaForCausalLM" not in _names(config.get("architectures")):
        raise ConfigError(
            f"{path}: architectures is {shown(config.get('architectures'))}; vLLM would serve embeddings, not text",
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
    return config


def _names(value: object) -> list[object]:
    """`value` if it is a list: `in` finds a part of a string, and fails on a number."""
    return value if isinstance(value, list) else []
