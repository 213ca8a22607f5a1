"""Checks of the source for what `verify` would refuse in the output: in the first second instead of after hours."""

from __future__ import annotations

from glm5_ascend.checkpoint.checks.config_keys import CONFIG, check_config
from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, check_stated_dtype
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.text_files import check_text_files
from glm5_ascend.checkpoint.source import Source
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.config_file import served_config

#: Ends of the names of tensors that public checkpoints carry and that are no weights: buffers computed from
#: config.json; scales of an FP8 engine's activations and caches.
UNUSED = (".rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale")
_SHOWN = 3


def check_source(source: Source) -> None:
    """Refuse a source whose output would not be the whole model.

    Raises:
        CheckpointError: a key of config.json, a tokenizer, chat template or generation config that engines misread, or
            tensors that no module of the model reads.
    """
    _check_texts(source)
    unused = source.config.absent_indexers
    unknown = sorted(
        name
        for name in source.files.entries.keys() - source.used
        if not name.endswith(UNUSED) and not source.names.hub_names[name].startswith(unused)
    )
    if unknown:
        shown = ", ".join(unknown[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        raise CheckpointError(
            f"{source.directory}: {len(unknown)} tensors are of no module that config.json describes: {shown:.300}",
            "they would be lost: correct config.json, merge the adapter (PEFT: merge_and_unload), or download again",
        )


def _check_texts(source: Source) -> None:
    report = Report(source.directory)
    keys = check_config(served_config(source.raw), report)
    checkpoint = LoadedCheckpoint(source.directory, source.config, keys, entries=source.files.entries)
    check_stated_dtype(checkpoint, report)
    check_text_files(checkpoint, report)
    report.raise_first_error(CONFIG)
