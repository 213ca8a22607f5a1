"""`verify`: the order of the checks."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.text_files import check_text_files, compare_text_files
from glm5_ascend.checkpoint.schemes import FLOAT
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckpointError
from glm5_ascend.options import with_options
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.compare_source import compare_source
from glm5_ascend.verify.derived_tensors import check_linear, check_shared_input
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.engines import ServingEngine, check_engine
from glm5_ascend.verify.file_hashes import check_hashes, read_record
from glm5_ascend.verify.float_values import check_finite, check_vectors_and_floats
from glm5_ascend.verify.mtp_rotation import check_mtp
from glm5_ascend.verify.open_checkpoint import open_directory
from glm5_ascend.verify.options import VerifyOptions
from glm5_ascend.verify.plausible import Doubts, add_doubts
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
    directory, engine, deep = Path(options.directory), options.engine, options.deep
    other = None if options.against is None else Path(options.against)
    report = Report(directory, other)
    checkpoint = open_directory(directory, report)
    check_text_files(checkpoint, report)
    # A wrong `against` is reported before the long read.
    source = None if other is None else SourceCheckpoint(other)
    if checkpoint.description is None:
        report.unchecked.append("anything behind the description, which cannot be read")
        return report
    doubts = Doubts(checkpoint)
    checked = _check_structure(checkpoint, report, doubts, deep or other is not None)
    if not deep and other is None:
        report.unchecked.append("values and hashes: the quick check reads names, dtypes and shapes")
        _report_engine(engine, checked, report)
        return report
    _check_values(checked, report, doubts)
    if source is not None:
        compare_text_files(checkpoint, source.directory, report)
        compare_source(checked, source, report)
    add_doubts(doubts.report, report)
    report.unchecked += _unchecked(checked, source is not None)
    _report_engine(engine, checked, report)
    return report


def _report_engine(engine: str | None, checked: Checked, report: Report) -> None:
    if engine is not None:
        check_engine(checked, ServingEngine(engine), report)


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


def _check_structure(checkpoint: LoadedCheckpoint, report: Report, doubts: Doubts, deep: bool) -> Checked:
    """Check names, dtypes, shapes; if `deep`, also that tensors are finite."""
    schemes = check_description(checkpoint, report)
    checked = Checked(checkpoint, schemes, complete=check_tensors(checkpoint, schemes, report))
    if deep:
        checked.non_finite = check_finite(checkpoint, report, doubts)
        checked.complete -= checked.non_finite | {name.rpartition(".")[0] for name in checked.non_finite}
    checked.global_rotation = check_mtp(checked, deep, report)
    return checked


def _check_values(checked: Checked, report: Report, doubts: Doubts) -> None:
    for module, scheme in checked.schemes.items():
        if module in checked.complete and scheme != FLOAT:
            try:
                check_linear(checked.checkpoint, module, scheme, report, doubts)
            except CheckpointError as error:  # the file changed during the check
                report.error("shard.damaged", error.message, tensor=f"{module}.weight", fix=error.tip)
    check_shared_input(checked, report)
    check_vectors_and_floats(checked, doubts)
    doubts.finish()
    checked.provenance = read_record(checked.checkpoint, report)
    check_hashes(checked.checkpoint, checked.provenance, report)
