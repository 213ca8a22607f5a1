"""One mutation: copy a correct checkpoint, damage the copy, and judge what `verify` says of it."""

from __future__ import annotations

import json
import shutil
import traceback
from pathlib import Path
from random import Random

from glm5_ascend.checkpoint.checks.report import CheckpointFinding, Report
from glm5_ascend.errors import Glm5Error
from glm5_ascend.verify import verify
from tests.verify.mutations import (
    kinds_bytes,
    kinds_index,
    kinds_rotation,
    kinds_source,
    kinds_tensors,
    kinds_values,
)
from tests.verify.mutations.mutator import KINDS, ImpossibleError, Kind, Place
from tests.verify.support.checkpoints import Correct
from tests.verify.support.editor import Checkpoint, module_of

#: Importing them fills KINDS.
THEMES = (kinds_tensors, kinds_index, kinds_bytes, kinds_values, kinds_rotation, kinds_source)


def trial(kind: Kind, correct: Correct, seed: str, folder: Path) -> str | None:
    """None if the defect was reported as it must be, else what is wrong with the report.

    Raises:
        ImpossibleError: the checkpoint has nothing this kind could damage.
    """
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(correct.directory, copy)
    checkpoint = Checkpoint(copy, correct.source)
    if not kind.by_hash:
        checkpoint.forget_hashes()
    where = kind.plant(checkpoint, Random(f"{kind.name} {seed}"))
    try:
        report = verify(copy, against=correct.source if kind.against else None)
    except Glm5Error as error:
        return f"exit code {error.exit_code}: {error.message}"
    except Exception:
        return traceback.format_exc()
    return judge(where, report)


def judge(where: Place, report: Report) -> str | None:
    """Describe what is wrong with a report about a defect at `where`; None if it is right."""
    errors = [finding for finding in report.findings if finding.level == "error"]
    text = "\n".join(finding.line() for finding in errors[:8])
    some = f"{sorted(where.names)[:3]} ({len(where.names)} names)"
    if not any({finding.tensor, finding.file} & where.names for finding in errors):
        return f"no error names {some}, only:\n{text}"
    accused = [finding for finding in errors if not belongs(finding, where)]
    if accused:
        return f"planted at {some}, but accused is {accused[0].line()}"
    for finding in report.findings:
        if "\n" in finding.line() or not (finding.message and finding.fix and (finding.tensor or finding.file)):
            return f"not one line that says what, where and what to do: {finding}"
    if report.exit_code != 1:
        return f"exit code {report.exit_code}"
    json.dumps(report.to_dict(), allow_nan=False)
    report.lines()
    return None


def belongs(finding: CheckpointFinding, where: Place) -> bool:
    """Return True if a finding is about the planted defect, or its module."""
    names = where.names | where.also
    modules = {module_of(name) for name in names if not name.endswith((".json", ".safetensors"))}
    modules |= {module.replace("model.language_model.", "model.") for module in modules}  # where SGLang reads its type
    return bool({finding.tensor, finding.file} & names) or (
        finding.tensor is not None and module_of(finding.tensor) in modules
    )


__all__ = ["KINDS", "ImpossibleError", "trial"]
