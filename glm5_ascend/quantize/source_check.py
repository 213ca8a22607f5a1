"""Checks of the source for what `verify` would refuse in the output: in the first second instead of after hours."""

from __future__ import annotations

from glm5_ascend.checkpoint.checks.config_keys import CONFIG, check_config
from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, check_stated_dtype
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.text_files import check_text_files
from glm5_ascend.checkpoint.output import served_config
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.config_file import read_config
from glm5_ascend.model.config_reader import flat_keys

#: Ends of the names of tensors that public checkpoints carry and no engine reads: buffers computed from config.json.
UNUSED = (".rotary_emb.inv_freq",)
_SHOWN = 3


def check_source(source: SourceCheckpoint) -> None:
    """Refuse a source whose output would not be the whole model.

    Raises:
        CheckpointError: a key of config.json, a tokenizer, chat template or generation config that engines misread, or
            tensors that no module of the model reads.
    """
    _check_texts(source)
    config = source.config
    names = {prefix + part.tensor_name for prefix, part in config.all_weights()}
    unused = config.absent_indexers
    unknown = sorted(
        name
        for name in source.files.entries
        if name.removesuffix("_scale_inv") not in names and not name.endswith(UNUSED) and not name.startswith(unused)
    )
    if unknown:
        shown = ", ".join(unknown[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        raise CheckpointError(
            f"{source.directory}: {len(unknown)} tensors are of no module that config.json describes: {shown:.300}",
            "they would be lost: correct config.json, or download the checkpoint again",
        )


def _check_texts(source: SourceCheckpoint) -> None:
    """Check config.json and the tokenizer's files as the output will have them."""
    raw = served_config(read_config(source.directory))
    report = Report(source.directory)
    check_config(raw, report)
    checkpoint = LoadedCheckpoint(source.directory, source.config, flat_keys(raw), entries=source.files.entries)
    check_stated_dtype(checkpoint, report)
    check_text_files(checkpoint, report)
    errors = [finding for finding in report.findings if finding.level == "error"]
    if errors:
        more = f" ({len(errors) - 1} more: glm5-ascend verify names them)" if len(errors) > 1 else ""
        file = errors[0].file or CONFIG
        fix = errors[0].fix if file == CONFIG else "correct it, or download this file again"
        raise CheckpointError(f"{source.directory / file}: {errors[0].message}{more}", fix)
