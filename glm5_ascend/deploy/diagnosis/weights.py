"""Facts about a checkpoint for the rules. Reads its JSON files, no tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.deploy.diagnosis.machine import on_network_mount
from glm5_ascend.deploy.rules.facts import short_name

MOUNTS = Path("/proc/mounts")


def facts(checkpoint: CheckpointSummary) -> dict[str, Any]:
    """Raises `CheckpointError` for an index that cannot be read."""
    directory, types = checkpoint.directory, checkpoint.types
    quantized = bool(types)
    facts: dict[str, Any] = {
        "model": directory.resolve().name,
        "quantized": quantized,
        "experts": checkpoint.experts,
        "attention": checkpoint.attention,
        "weights": short_name(checkpoint.experts),
        "linear_types": tuple(sorted({t for name, t in types.items() if ".mlp.experts." not in name})),
        "kv_b_quantized": any(t != "FLOAT" for name, t in types.items() if name.endswith(".kv_b_proj.weight")),
        "shared_indexers": checkpoint.shared_indexers,
        "mtp_layers": checkpoint.config.get("num_nextn_predict_layers") or 0,
    }
    if quantized:
        facts["group_size"] = checkpoint.group_size
    names = tensor_names(directory)
    if names is not None:
        facts |= _of_index(checkpoint, names)
    if MOUNTS.is_file():
        facts["network_mount"] = on_network_mount(directory.resolve(), MOUNTS.read_text(encoding="utf-8"))
    return facts


def _of_index(checkpoint: CheckpointSummary, names: set[str]) -> dict[str, Any]:
    layers = checkpoint.config.get("num_hidden_layers", 0)
    without = [i for i in range(layers) if f"model.layers.{i}.self_attn.indexer.wk.weight" not in names]
    mtp = sum(name.startswith(f"model.layers.{layers}.") for name in names)
    return {"layers_without_indexer": len(without), "mtp_tensors": mtp}


def tensor_names(directory: Path) -> set[str] | None:
    """Names of all tensors in the index that vLLM reads; None without one. Raises `CheckpointError` for a bad one."""
    from glm5_ascend.checkpoint.index import read_weight_map  # loads torch

    weight_map = read_weight_map(directory)
    return None if weight_map is None else set(weight_map)
