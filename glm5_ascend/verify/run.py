"""`verify`: the order of the checks."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.text_files import check_text_files, compare_text_files
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.options import with_options
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.compare_source import compare_source
from glm5_ascend.verify.derived_tensors import check_shared_input
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.engines import ServingEngine, check_engine
from glm5_ascend.verify.file_hashes import check_hashes, read_record, recorded_files
from glm5_ascend.verify.float_values import check_vectors_and_floats
from glm5_ascend.verify.mtp_rotation import check_mtp
from glm5_ascend.verify.open_checkpoint import open_directory
from glm5_ascend.verify.options import VerifyOptions
from glm5_ascend.verify.plausible import Doubts, add_doubts
from glm5_ascend.verify.read_once import read_once
from glm5_ascend.verify.tensors import check_tensors


@with_options(VerifyOptions)
@torch.no_grad()
def verify(options: VerifyOptions) -> Report:
    """Read a quantized checkpoint as the engine's loader would, and report what the loader would not.

    Returns:
        The findings; `report.ok` is the verdict, `report.to_dict()` the data of `glm5-ascend verify --json`.
    Raises:
        ConfigError, CheckpointError: `directory` or `against` is not a GLM-5 checkpoint. Defects inside a quantized
            checkpoint are findings.
    """
    directory = Path(options.directory)
    engine = None if options.engine is None else ServingEngine(options.engine)
    other = None if options.against is None else Path(options.against)
    report = Report(directory, other)
    checkpoint = open_directory(directory, report)
    check_text_files(checkpoint, report)
    # A wrong `against` is reported before the long read.
    source = None if other is None else open_source(other)
    if checkpoint.description is None:
        report.unchecked.append("anything behind the description, which cannot be read")
        return report
    doubts = Doubts(checkpoint)
    schemes = check_description(checkpoint, report)
    checked = Checked(checkpoint, schemes, complete=check_tensors(checkpoint, schemes, report))
    if options.deep or source is not None:
        _check_values(checked, report, doubts)
        if source is not None:
            compare_text_files(checkpoint, source.directory, report)
            compare_source(checked, source, report)
        add_doubts(doubts.report, report)
        report.unchecked += _unchecked(checked, source is not None)
    else:
        check_mtp(checked, False, report)
        report.unchecked.append("values and hashes: the quick check reads names, dtypes and shapes")
    if engine is not None:
        check_engine(checked, engine, report)
    return report


def _unchecked(checked: Checked, compared: bool) -> list[str]:
    """Return what no check without a source, or without recorded hashes, can decide."""
    if compared:
        return []
    out = ["whether weights are the source's: give it as --against"]
    if not isinstance(checked.provenance.get("outputs"), dict):
        out.append(
            "whether the tokenizer (the order of its tokens, merges that are left out), the chat template, "
            "config.json (rope_theta, rms_norm_eps, index_topk and the like) and vectors are the source's: they are "
            "sound by themselves, and there are no recorded hashes"
        )
    return out


def _check_values(checked: Checked, report: Report, doubts: Doubts) -> None:
    checkpoint = checked.checkpoint
    checked.provenance = read_record(checkpoint, report)
    recorded = recorded_files(checkpoint, checked.provenance)
    hashes = read_once(checked, recorded.keys() & checkpoint.shards.keys(), report, doubts)
    checked.global_rotation = check_mtp(checked, True, report)
    check_shared_input(checked, report)
    check_vectors_and_floats(checked, doubts)
    doubts.finish()
    check_hashes(checkpoint, recorded, hashes, report)
