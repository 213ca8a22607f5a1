"""Open config.json, description, index and shards as vLLM's default loader does.

Source: vLLM 0.27.1 `default_loader.py`, `weight_utils.py` (which files are loaded); vllm-ascend `modelslim_config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from glm5_ascend.checkpoint.checks.config_keys import check_config
from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.index import INDEX_NAME, read_weight_map
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME
from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import parse_config, read_config, served_config
from glm5_ascend.verify.stray_files import check_tree

#: msModelSlim's index; vLLM does not know this name.
REFERENCE_INDEX = "quant_model_weights.safetensors.index.json"
_COPY = "copy the file again"
_COPY_BOTH = "index and shard belong to different runs: copy both again"
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
    raw = read_config(directory)
    config = parse_config(raw, directory / "config.json")
    quantized = os.path.lexists(directory / DESCRIPTION_NAME)
    keys = check_config(raw if quantized else served_config(raw), report)
    checkpoint = LoadedCheckpoint(directory, config, keys)
    report.file_of = checkpoint.file_of
    outside = check_tree(directory, report)
    try:
        checkpoint.description = _spelled_keys(checkpoint.read_json(DESCRIPTION_NAME), config, report)
    except CheckpointError as error:
        report.error("description.unreadable", error.message, file=DESCRIPTION_NAME, fix=_WITHOUT)
        if not quantized:
            _check_source(directory, report)
    _open_shards(checkpoint, outside, report)
    if checkpoint.description is not None and _other_prefix(checkpoint, report):
        checkpoint.description = None
    report.tensors = len(checkpoint.entries)
    report.bytes = sum(entry.end - entry.start for entry in checkpoint.entries.values())
    return checkpoint


def _spelled_keys(description: dict[str, object], config: ModelConfig, report: Report) -> dict[str, object]:
    """Return the description with the spec's names, whichever writer's names it has."""
    out: dict[str, object] = {}
    for key, value in description.items():
        if (name := config.spec.spelled(key)) in out:
            report.error(
                "description.key_twice", "two keys of one tensor", tensor=key, file=DESCRIPTION_NAME, fix=_COPY
            )
        out[name] = value
    return out


def _other_prefix(checkpoint: LoadedCheckpoint, report: Report) -> bool:
    """Report layers whose names begin otherwise than the model's: one cause, not an error for every tensor."""
    model = {checkpoint.config.spec.layers_prefix}
    tensors, keys = _layer_prefixes(checkpoint.entries), _layer_prefixes(checkpoint.description or ())
    for names, file in ((tensors, INDEX_NAME), (keys, DESCRIPTION_NAME)):
        if names and not names & model:
            why = f"layers begin with {min(names)!r}, the engine asks for {min(model)!r}"
            report.error("description.prefix", why, file=file, fix="rename them there, or quantize again")
            return True
    return False


def _layer_prefixes(names: Iterable[str]) -> set[str]:
    return {before + "layers." for before, layers, _ in (name.partition("layers.") for name in names) if layers}


def _check_source(directory: Path, report: Report) -> None:
    """Report why a checkpoint without a description is no source of a quantization either."""
    try:
        open_source(directory)
    except CheckpointError as error:
        report.error("checkpoint.source", error.message, file=DESCRIPTION_NAME, fix=error.tip)


def _open_shards(checkpoint: LoadedCheckpoint, outside: set[str], report: Report) -> None:
    directory, spelled = checkpoint.directory, checkpoint.config.spec.spelled
    present = {path.name for path in directory.glob("*.safetensors")}
    weight_map = None if INDEX_NAME in outside else _weight_map(directory, INDEX_NAME, spelled, report)
    promised = weight_map
    if weight_map is None and REFERENCE_INDEX not in outside:
        promised = _weight_map(directory, REFERENCE_INDEX, spelled, report)  # it only says which tensors should exist
    if not (directory / INDEX_NAME).exists():
        report.warning(
            "index.missing",
            "not found: vLLM loads every *.safetensors of the directory and cannot notice a missing one",
            file=INDEX_NAME,
            fix=f"if {REFERENCE_INDEX} exists, copy it to {INDEX_NAME}",
        )
    loaded = set(weight_map.values()) if weight_map is not None else present
    promised = promised or {}
    for name in sorted(present - set(promised.values()) if promised else ()):
        why = "it is not loaded" if weight_map is not None else "it is loaded as well"
        fix = "remove the file if it belongs to an earlier run, else put its tensors into the index"
        report.error("files.unlisted_shard", f"not in the index: stale, or forgotten; {why}", file=name, fix=fix)
    if not loaded:
        report.error("files.no_shards", "no *.safetensors files", file=INDEX_NAME, fix="copy the checkpoint again")
    in_file: dict[str, set[str]] = {}
    for tensor, name in promised.items():
        in_file.setdefault(name, set()).add(tensor)
    listed = sorted(loaded | in_file.keys())
    missing = [name for name in listed if name not in present]
    if missing:
        lost = sum(len(in_file.get(name, ())) for name in missing)
        why = f"not found, the index expects {lost} tensors in it"
        if len(missing) > 1:
            why = f"{len(missing)} of {len(listed)} files of the index are missing, with {lost} tensors; first this"
        report.error("index.file_missing", why, file=missing[0], fix="download or copy what is missing")
    for name in listed:
        tensors = in_file.get(name, set())
        if name in present and name not in outside:
            try:
                checkpoint.shards[name] = Shard(directory / name)
                continue
            except CheckpointError as error:
                why = f"{error.message} ({len(tensors)} tensors lost)"
                report.error("shard.damaged", why, file=name, fix=error.tip)
        checkpoint.unreadable |= tensors
        checkpoint.file_of.update(dict.fromkeys(tensors, name))
    _locate(checkpoint, promised, report)


def _weight_map(directory: Path, name: str, spelled: Callable[[str], str], report: Report) -> dict[str, str] | None:
    try:
        weight_map = read_weight_map(directory, name)
        return weight_map and {spelled(tensor): file for tensor, file in weight_map.items()}
    except CheckpointError as error:
        report.error("index.damaged", error.message, file=name, fix=error.tip)
        return None


def _locate(checkpoint: LoadedCheckpoint, promised: dict[str, str], report: Report) -> None:
    """Fill the entries from the shards, and compare them with the index."""
    names_of: dict[str, set[str]] = {}
    for file, shard in checkpoint.shards.items():
        names_of[file] = set(map(checkpoint.config.spec.spelled, shard.entries))
        for entry in shard.entries.values():
            name = checkpoint.config.spec.spelled(entry.name)
            if name in checkpoint.entries:
                other = checkpoint.file_of[name]
                why = f"also in {other}: the order of the files decides which one is loaded"
                report.error("tensor.duplicate", why, tensor=name, file=file, fix="remove the stale shard")
                if promised.get(name) != file:
                    continue
            elif promised and name not in promised:
                why = "in the shard but not in the index"
                report.error("index.tensor_unlisted", why, tensor=name, file=file, fix=_COPY_BOTH)
            checkpoint.entries[name], checkpoint.file_of[name] = entry, file
            checkpoint.unreadable.discard(name)
    for name, file in promised.items():
        if file in checkpoint.shards and name not in names_of[file]:
            why = "the index lists it, the shard does not hold it"
            report.error("index.tensor_missing", why, tensor=name, file=file, fix=_COPY_BOTH)
