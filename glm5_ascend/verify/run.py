"""The order of the checks, and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.checkpoint.schemes import FLOAT
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckpointError
from glm5_ascend.verify.compare_same_job import compare_twin, is_twin, read_twin
from glm5_ascend.verify.compare_source import compare
from glm5_ascend.verify.derived_tensors import check_finite, check_linear, check_shared_input
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.file_hashes import check_hashes, read_record
from glm5_ascend.verify.mtp_rotation import check_mtp
from glm5_ascend.verify.open_checkpoint import open_directory
from glm5_ascend.verify.report import Report
from glm5_ascend.verify.tensors import check_tensors


@torch.no_grad()
def verify(directory: Path, against: Path | None = None, deep: bool = True) -> Report:
    """Check a quantized checkpoint; with `against`, compare it as well.

    Args:
        against: its source: dequantize and compare every tensor. Or the output of the same job on another machine, or
            the provenance file of one: tell damage from another instruction set (twin.py).
        deep: read and check the values too, not only names, types and shapes.
    Raises:
        ConfigError, CheckpointError: `directory` or `against` is no GLM-5 checkpoint at all. Defects inside a
            quantized checkpoint are findings.
    """
    report = Report(directory, against)
    contents = open_directory(directory, report)
    twin = against if against is not None and is_twin(against) else None
    theirs = read_twin(twin) if twin is not None else {}  # a wrong SRC is said before the long read
    source = SourceCheckpoint(against) if against is not None and twin is None else None
    if contents.description is None:
        return report
    types = check_description(contents, report)
    complete = check_tensors(contents, types, report)
    deep = deep or against is not None
    bad = check_finite(contents, report) if deep else set()
    complete -= bad | {name.rpartition(".")[0] for name in bad}
    q = check_mtp(contents, bad, deep, report)
    if not deep:
        return report
    for module in types:
        if module in complete and types[module] != FLOAT:
            try:
                check_linear(contents, module, types[module], report)
            except CheckpointError as error:  # the file changed under our hands
                report.error("shard.damaged", error.message, tensor=f"{module}.weight", fix=error.tip)
    check_shared_input(contents, types, complete, report)
    record = read_record(contents, report)
    check_hashes(contents, record, report)
    if twin is not None:
        compare_twin(contents, types, complete, record, twin, theirs, report)
    if source is not None:
        compare(contents, source, types, complete, record, q, report)
    return report
