"""What `verify` will refuse in the output, refused in the source: in the first second instead of after hours."""

from __future__ import annotations

from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.model import structure
from glm5_ascend.model.config import indexer_schedule
from glm5_ascend.model.json_file import read_json_object

#: Ends of the names of tensors that public checkpoints carry and no engine reads: buffers computed from config.json.
UNUSED = (".rotary_emb.inv_freq",)
_SHOWN = 3


def check_source(source: SourceCheckpoint) -> None:
    """Refuse a source whose output would not be the whole model.

    Raises:
        CheckpointError: tensors that no module of the model reads. ConfigError: an indexer schedule that contradicts
            `indexer_types`.
    """
    _check_schedule(source)
    config = source.config
    known = {prefix + structure.tensor_name(part) for prefix, part in structure.all_parts(config)}
    shared = tuple(  # the engine drops them, too
        f"{structure.layer_prefix(layer)}self_attn.indexer."
        for layer in range(config.num_layers_with_mtp)
        if not config.has_indexer(layer)
    )
    unknown = sorted(
        name
        for name in source.files.entries
        if name.removesuffix("_scale_inv") not in known and not name.endswith(UNUSED) and not name.startswith(shared)
    )
    if unknown:
        names = ", ".join(unknown[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        raise CheckpointError(
            f"{source.directory}: {len(unknown)} tensors are of no module that config.json describes: {names:.300}",
            "they would be lost: correct config.json, or download the checkpoint again",
        )


def _check_schedule(source: SourceCheckpoint) -> None:
    """A layer shares an indexer in the engine only if the schedule's keys skip it and `indexer_types` says so."""
    config = source.config
    raw = read_json_object(source.directory / "config.json", error=ConfigError)
    computes = indexer_schedule(raw, config.num_hidden_layers)
    wrong = [i for i, kind in enumerate(config.indexer_types) if kind == "shared" and computes[i]]
    if raw.get("indexer_types") is not None and wrong:
        raise ConfigError(
            f"{source.directory / 'config.json'}: layers {wrong[:8]} are 'shared' in indexer_types, but "
            "index_topk_freq and index_skip_topk_offset (or index_topk_pattern) let them compute",
            "take these keys from the model's own config.json",
        )
