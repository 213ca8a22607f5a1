"""The order of the checks, and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.checkpoint.schemes import FLOAT
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckpointError
from glm5_ascend.verify.against import compare
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.files import open_directory
from glm5_ascend.verify.mtp import check_mtp
from glm5_ascend.verify.report import Report
from glm5_ascend.verify.tensors import check_tensors
from glm5_ascend.verify.values import check_finite, check_linear, check_shared_input


@torch.no_grad()
def verify(directory: Path, against: Path | None = None, deep: bool = True) -> Report:
    """Check a quantized checkpoint; with `against`, dequantize it and compare with its source.

    Args:
        deep: read and check the values too, not only names, types and shapes.
    Raises:
        ConfigError, CheckpointError: `directory` or `against` is no GLM-5 checkpoint at all. Defects inside a
            quantized checkpoint are findings.
    """
    report = Report(directory, against)
    contents = open_directory(directory, report)
    source = SourceCheckpoint(against) if against is not None else None  # a wrong SRC is said before the long read
    if contents.description is None:
        return report
    types = check_description(contents, report)
    complete = check_tensors(contents, types, report)
    deep = deep or source is not None
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
    if source is not None:
        compare(contents, source, types, complete, q, report)
    return report
