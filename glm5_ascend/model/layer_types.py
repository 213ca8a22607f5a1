"""The kinds of the main layers, by config.json: `mlp_layer_types`, `indexer_types`, and the keys that stand for them.

Errors: `ConfigError` where keys contradict each other. Source of the indexer schedule: transformers 5.19
`GlmMoeDsaConfig`, vLLM 0.32 `deepseek_v2.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError


def mlp_layer_types(raw: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    """'dense' or 'sparse' per main layer."""
    dense = raw.get("first_k_dense_replace")
    types = raw.get("mlp_layer_types")
    if types is None:
        if not isinstance(dense, int) or dense < 0:
            raise ConfigError(
                f"{path}: neither mlp_layer_types nor a first_k_dense_replace >= 0 is given", "correct config.json"
            )
        types = ["dense"] * min(dense, layers) + ["sparse"] * (layers - min(dense, layers))
    if len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError(f"{path}: mlp_layer_types must be {layers} times 'dense' or 'sparse'", "correct config.json")
    # Bounded by the layers first: a list of `dense` entries could be of any length.
    if dense is not None and (
        not 0 <= dense <= layers or list(types) != ["dense"] * dense + ["sparse"] * (layers - dense)
    ):
        raise ConfigError(
            f"{path}: mlp_layer_types and first_k_dense_replace {dense} disagree",
            "the engine reads the latter: correct one",
        )
    return tuple(types)


def indexer_schedule(raw: dict[str, Any], layers: int) -> list[bool]:
    """Which main layers compute their own top-k at run time; vLLM reads these keys, not `indexer_types`."""
    pattern = raw.get("index_topk_pattern")
    if pattern is not None:
        return [i >= len(pattern) or pattern[i] != "S" for i in range(layers)]
    freq, offset = max(raw.get("index_topk_freq") or 1, 1), raw.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset  # the default in vLLM and transformers; GLM-5.2 has 3
    return [max(i - offset + 1, 0) % freq == 0 for i in range(layers)]


def indexer_types(raw: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    """'full' or 'shared' per main layer: whether it has an indexer, or uses the positions of an earlier one."""
    types = raw.get("indexer_types")
    pattern = raw.get("index_topk_pattern")
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if types is None:
        types = ["full" if computes else "shared" for computes in indexer_schedule(raw, layers)]
    if len(types) != layers or any(kind not in ("full", "shared") for kind in types):
        raise ConfigError(f"{path}: indexer_types must be {layers} times 'full' or 'shared'", "correct config.json")
    if types[0] == "shared":
        what = f"{path}: indexer_types[0] is 'shared': the first layer has nothing to share"
        raise ConfigError(what, "correct config.json")
    return tuple(types)
