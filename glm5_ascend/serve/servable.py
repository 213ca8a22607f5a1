"""Checks of a checkpoint directory before an engine loads it: engines misread many defects without a message."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.checks.config_keys import require_sound_config
from glm5_ascend.checkpoint.summary import CheckpointSummary, summarize
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError, ConfigError, shell_word, shown
from glm5_ascend.model.config_values import indexer_schedule, schedule_keys
from glm5_ascend.serve.environment import on_ascend
from glm5_ascend.serve.plugin.description import load_description


def check_name(directory: Path) -> None:
    """Raise `ConfigError` for a directory that vLLM cannot name: it reads [], * and ? as patterns, and UTF-8 only."""
    text = str(directory)
    if re.search(r"[][*?]", text) or not text.isprintable():
        raise ConfigError(
            f"{shown(text, 200)}: vLLM finds no weights below such a name",
            f"serve a link to it: ln -s {shell_word(os.path.abspath(text))} NAME",
        )


def check_directory(directory: Path) -> CheckpointSummary:
    """Check config.json, the description and the shards' headers of a checkpoint, and summarize it. Reads no tensor.

    Raises:
        ConfigError: an engine would refuse config.json, or compute another model by it.
        CheckpointError: a format that no engine here loads; no weights; shards, names, shapes or dtypes that do not
            fit config.json; tokenizer files or a description that are damaged. `verify` says what is inconsistent.
    """
    checkpoint = summarize(directory)
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} has no .safetensors file", "the weights are missing: copy them")
    from glm5_ascend.checkpoint.index import CheckpointDir  # imports torch, which a wrong directory does not need

    if not (directory / DESCRIPTION_NAME).exists():
        _check_float(directory)
        return checkpoint
    require_sound_config(directory, checkpoint.raw)
    CheckpointDir(directory)
    load_description(directory)
    return checkpoint


def _check_float(directory: Path) -> None:
    """Check a checkpoint that is not quantized as `quantize` does, and that an engine knows its names."""
    from glm5_ascend.checkpoint.checks.source import check_source
    from glm5_ascend.checkpoint.source import open_source

    source = open_source(directory)
    check_source(source)
    if on_ascend():  # our plugin adds what vLLM needs to config.json on a CPU only
        require_sound_config(directory, source.raw)
    if source.is_fp8:
        raise CheckpointError(
            f"{directory}: FP8 weights, which neither an Atlas A2 or A3 nor vLLM on a CPU multiplies",
            f"quantize it: glm5-ascend quantize {directory} OUT",
        )
    if renamed := source.names.renamed:
        name, stored = next(iter(renamed.items()))
        raise CheckpointError(
            f"{directory}: {len(renamed)} weights have names that no engine knows: {stored}, the hub has {name}",
            "glm5-ascend quantize reads them and writes the hub's names; to serve it in float, rename them",
        )


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
    keys = schedule_keys(config)
    vllm_pattern = "".join("F" if has_indexer else "S" for has_indexer in indexer_schedule(config, layers))
    if keys and vllm_pattern != pattern:
        layer = next(i for i, (a, b) in enumerate(zip(pattern, vllm_pattern, strict=False)) if a != b)
        raise ConfigError(
            f"config.json: indexer_types has layer {layer} {types[layer]!r}, but {keys} says otherwise",
            "restore config.json from the source checkpoint, or remove the keys that are wrong",
        )
    return pattern
