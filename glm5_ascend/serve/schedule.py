"""Which layers share an indexer (GLM-5.2): transformers writes `indexer_types`, vLLM reads other keys.

A config with `indexer_types` alone would get an indexer in every layer from vLLM; one whose keys disagree means two
models at once. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.errors import ConfigError
from glm5_ascend.model.config_file import indexer_schedule

READ_BY_VLLM = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def topk_pattern(config: dict[str, Any]) -> str | None:
    """What `index_topk_pattern` must be for vLLM: F = own indexer, S = the last one's choice, by layer.

    Args:
        config: config.json, or a transformers config's `to_dict()`.
    Returns:
        None if the config names no `indexer_types`: then vLLM's own reading is right.
    Raises:
        ConfigError: the keys vLLM reads say otherwise.
    """
    types = config.get("indexer_types")
    if types is None:
        return None
    layers = config["num_hidden_layers"]
    pattern = "".join("S" if kind == "shared" else "F" for kind in types[:layers])
    given = {key: config[key] for key in READ_BY_VLLM if config.get(key) is not None}
    meant = "".join("F" if computes else "S" for computes in indexer_schedule(config, layers))
    if given and meant != pattern:
        layer = next(i for i, (a, b) in enumerate(zip(pattern, meant, strict=False)) if a != b)
        raise ConfigError(
            f"config.json: indexer_types has layer {layer} {types[layer]!r}, "
            f"but {', '.join(f'{key}={value}' for key, value in given.items())} says otherwise",
            "restore config.json from the source checkpoint, or remove the keys that are wrong",
        )
    return pattern
