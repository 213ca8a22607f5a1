"""Open config.json, description, index and shards as vLLM's default loader does.

Source: vLLM 0.27.1 `default_loader.py`, `weight_utils.py` (which files are loaded); vllm-ascend `modelslim_config.py`.
"""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.checkpoint.checks.config_keys import check_config
from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.index import INDEX_NAME, read_weight_map
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME
from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model.config_file import load_config, read_config
from glm5_ascend.verify.stray_files import check_tree

#: msModelSlim's index; vLLM does not know this name.
REFERENCE_INDEX = "quant_model_weights.safetensors.index.json"
_COPY = "copy the file again"
_WITHOUT = "a float checkpoint has none: glm5-ascend quantize writes one to verify; of a quantized one " + _COPY


def open_directory(directory: Path, report: Report) -> LoadedCheckpoint:
    """Read everything that can be read; defects go into `report`.

    Raises:
        ConfigError: not the directory of a GLM-5 checkpoint.
    """
    if not inside(directory / "config.json", directory):
        raise ConfigError(
            f"{directory / 'config.json'}: a link to the outside is not followed", "replace the link by the file"
        )
    config = load_config(directory)
    checkpoint = LoadedCheckpoint(directory, config, read_config(directory))
    report.file_of = checkpoint.file_of
    check_config(checkpoint.raw, report)
    outside = check_tree(directory, report)
    try:
        checkpoint.description = checkpoint.read_json(DESCRIPTION_NAME)
    except CheckpointError as error:
        report.error("description.unreadable", error.message, file=DESCRIPTION_NAME, fix=_WITHOUT)
    _open_shards(checkpoint, outside, report)
    report.tensors = len(checkpoint.entries)
    report.bytes = sum(entry.end - entry.start for entry in checkpoint.entries.values())
    return checkpoint


def _open_shards(checkpoint: LoadedCheckpoint, outside: set[str], report: Report) -> None:
    directory = checkpoint.directory
    present = {path.name for path in directory.glob("*.safetensors")}
    weight_map = _weight_map(directory, report) if INDEX_NAME not in outside else None
    promised = weight_map
    if weight_map is None and REFERENCE_INDEX not in outside:
        promised = _reference_weight_map(directory, report)
    loaded = set(weight_map.values()) if weight_map is not None else present
    promised = promised or {}
    for name in sorted(present - set(promised.values()) if promised else ()):
        report.error(
            "files.unlisted_shard",
            "not in the index: stale, or forgotten; "
            + ("it is not loaded" if weight_map is not None else "it is loaded as well"),
            file=name,
            fix="remove the file if it belongs to an earlier run, else put its tensors into the index",
        )
    if not loaded:
        report.error("files.no_shards", "no *.safetensors files", file=INDEX_NAME, fix="copy the checkpoint again")
    in_file: dict[str, set[str]] = {}
    for tensor, name in promised.items():
        in_file.setdefault(name, set()).add(tensor)
    for name in sorted(loaded | in_file.keys()):
        tensors = in_file.get(name, set())
        if name not in present:
            report.error(
                "index.file_missing",
                f"not found, the index expects {len(tensors)} tensors in it",
                file=name,
                fix="download or copy the missing shard",
            )
        elif name not in outside:
            try:
                checkpoint.shards[name] = Shard(directory / name)
                continue
            except CheckpointError as error:
                report.error(
                    "shard.damaged", f"{error.message} ({len(tensors)} tensors lost)", file=name, fix=error.tip
                )
        checkpoint.unreadable |= tensors
        checkpoint.file_of.update(dict.fromkeys(tensors, name))
    _locate(checkpoint, promised, report)
    _check_total_size(checkpoint, promised, INDEX_NAME if weight_map is not None else REFERENCE_INDEX, report)


def _weight_map(directory: Path, report: Report) -> dict[str, str] | None:
    try:
        weight_map = read_weight_map(directory)
    except CheckpointError as error:
        report.error("index.damaged", error.message, file=INDEX_NAME, fix=error.tip)
        return None
    if weight_map is None:
        report.warning(
            "index.missing",
            "not found: vLLM loads every *.safetensors of the directory and cannot notice a missing one",
            file=INDEX_NAME,
            fix=f"if {REFERENCE_INDEX} exists, copy it to {INDEX_NAME}",
        )
    return weight_map


def _reference_weight_map(directory: Path, report: Report) -> dict[str, str] | None:
    """Read msModelSlim's index, which only says which tensors should exist."""
    try:
        weight_map = read_json_object(directory / REFERENCE_INDEX, max_bytes=MAX_BYTES_BY_TENSOR).get("weight_map")
    except CheckpointError as error:
        if (directory / REFERENCE_INDEX).is_file():
            report.error("index.damaged", error.message, file=REFERENCE_INDEX, fix=error.tip)
        return None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        for file in weight_map.values()
    ):
        report.error("index.damaged", "weight_map is not a map of tensors to shards", file=REFERENCE_INDEX, fix=_COPY)
        return None
    return weight_map


def _locate(checkpoint: LoadedCheckpoint, promised: dict[str, str], report: Report) -> None:
    """Fill the entries from the shards, and compare them with the index."""
    for file, shard in checkpoint.shards.items():
        for name, entry in shard.entries.items():
            if name in checkpoint.entries:
                other = checkpoint.file_of[name]
                report.error(
                    "tensor.duplicate",
                    f"also in {other}: the order of the files decides which one is loaded",
                    tensor=name,
                    file=file,
                    fix="remove the stale shard",
                )
                if promised.get(name) != file:
                    continue
            elif promised and name not in promised:
                report.error(
                    "index.tensor_unlisted",
                    "in the shard but not in the index",
                    tensor=name,
                    file=file,
                    fix="index and shard belong to different runs: copy both again",
                )
            checkpoint.entries[name], checkpoint.file_of[name] = entry, file
            checkpoint.unreadable.discard(name)
    for name, file in promised.items():
        if file in checkpoint.shards and name not in checkpoint.shards[file].entries:
            report.error(
                "index.tensor_missing",
                "the index lists it, the shard does not hold it",
                tensor=name,
                file=file,
                fix="index and shard belong to different runs: copy both again",
            )


def _check_total_size(checkpoint: LoadedCheckpoint, promised: dict[str, str], index: str, report: Report) -> None:
    if not promised or checkpoint.unreadable:
        return
    try:
        metadata = checkpoint.read_json(index).get("metadata")
    except CheckpointError:
        return  # reported when the map was read
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = {name: entry.end - entry.start for name, entry in checkpoint.entries.items()}
    # msModelSlim adds rot.weight after it has summed up.
    if stated not in (sum(total.values()), sum(total.values()) - total.get(ROT_NAME, 0)):
        report.warning(
            "index.total_size",
            f"metadata.total_size is {stated}, the tensors have {sum(total.values())} bytes",
            file=index,
            fix="harmless for the engine; index and shards may be of different runs",
        )
