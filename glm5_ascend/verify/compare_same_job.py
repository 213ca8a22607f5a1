"""Compare two outputs of one job: is a difference damage, or the arithmetic of the other machine?

The rule. A quantization is deterministic: equal inputs (source, recipe, calibration texts, seed, version of this tool)
on an equal build (torch, instruction set, device) give equal bytes, and every output records the hashes of its files.

    a file's bytes are not the recorded ones      damage or edited since: error (file_hashes.py)
    other inputs                                  not the same job: error
    equal inputs, equal build, other hashes       one of the two runs went wrong: error, by file
    equal inputs, other build, other hashes       another instruction set rounds sums in another order: warning ...
    ... and a weight whose value differs          not rounding: error, by tensor

"Value differs" is judged as for a source, by the limits of tolerances.py. Comparing integers would be wrong: a sum
that is rounded differently can make the search for a smoothing scale end one step later, and then a whole row of
up_proj and a column of down_proj have other integers and the same product. Measured on the demo model in W4A8, AVX512
against none: 14 % of all integers, by up to 42 steps.

With only the other's provenance file, and no tensors, the last two look the same: the warning says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.compare_source import compare_weights
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.expected_weight import NO_ROTATION, ExpectedWeights, OtherOutput
from glm5_ascend.verify.file_hashes import check_hashes, is_format_file, is_tokenizer_file
from glm5_ascend.verify.open_checkpoint import open_directory
from glm5_ascend.verify.tensors import check_tensors


def is_output(path: Path) -> bool:
    """Return True if `--against` names a quantized checkpoint, or its provenance file, and not a source."""
    return path.is_file() or (path / DESCRIPTION_NAME).is_file()


def read_provenance(path: Path) -> dict[str, Any]:
    """Read the provenance of the other checkpoint.

    Raises:
        CheckpointError: there is no record.
    """
    return read_json_object(path if path.is_file() else path / PROVENANCE_NAME)


def compare_same_job(checked: Checked, other: Path, theirs: dict[str, Any], report: Report) -> None:
    """Apply the rule to this checkpoint and `other`, whose provenance is `theirs`.

    Raises:
        CheckpointError: the other checkpoint is damaged itself.
    """
    second = None if other.is_file() else _open_other(other, theirs)
    if not _same_job(checked.provenance, theirs, other, report):
        return
    mine, its = checked.provenance.get("outputs"), theirs.get("outputs")
    if not isinstance(mine, dict) or not isinstance(its, dict):
        report.error("twin.inputs", "no hashes recorded in one of the two", file=PROVENANCE_NAME, fix="quantize again")
        return
    names = sorted(mine.keys() | its.keys())
    differ = [name for name in names if mine.get(name) != its.get(name)]
    for name in filter(is_tokenizer_file, differ):  # copies, on every build
        why = f"not the tokenizer of {other}, although both are copies of their source's"
        report.error("twin.inputs", why, file=name, fix="compare outputs of one source")
    names, differ = (list(filter(is_format_file, files)) for files in (names, differ))
    if not differ:
        return
    ours_built, theirs_built = _build(checked.provenance), _build(theirs)
    if ours_built == theirs_built:
        for name in differ:
            why = f"other bytes than in {other}, although both were made by {ours_built}"
            fix = "one of the two runs went wrong: quantize again (or the sources differ: only headers are recorded)"
            report.error("twin.differs", why, file=name, fix=fix)
        return
    summary = f"{len(differ)} of {len(names)} files differ from {other}, made by {theirs_built}, here {ours_built}"
    fix = "expected between machines; the same build gives the same bytes"
    if second is None:
        fix = "give the other checkpoint's directory, or the source, to compare all weights"
    why = f"{summary}: another instruction set rounds sums in another order"
    report.warning("twin.build", why, file=PROVENANCE_NAME, fix=fix)
    if second is not None:
        compare_weights(checked, ExpectedWeights(second, checked.checkpoint, NO_ROTATION), report)


def _same_job(ours: dict[str, Any], theirs: dict[str, Any], other: Path, report: Report) -> bool:
    """Return True if both were made from equal inputs; report it if not."""
    changed = [
        key for key in ("tool", "source", "recipe", "calibration", "seed") if _input(ours, key) != _input(theirs, key)
    ]
    if changed or not ours:
        why = f"other {', '.join(changed)}" if ours else "no provenance here"
        fix = "compare outputs of one source, recipe, calibration text and seed"
        report.error("twin.inputs", f"not the same job as {other}: {why}", file=PROVENANCE_NAME, fix=fix)
    return not changed and bool(ours)


def _input(record: dict[str, Any], key: str) -> Any:
    """Return the part of the record that defines the job, without paths and names."""
    value = record.get(key)
    free = {"source": "path", "recipe": "name", "calibration": "file"}.get(key)
    return {k: v for k, v in value.items() if k != free} if isinstance(value, dict) else value


def _build(record: dict[str, Any]) -> str:
    """Describe the facts that the bits of a sum depend on."""
    versions, machine = record.get("versions"), record.get("machine")
    torch_build = [versions.get(key) for key in ("torch", "torch_build")] if isinstance(versions, dict) else []
    facts = list(machine.values()) if isinstance(machine, dict) else []
    return f"torch {' '.join(str(x)[:12] for x in torch_build)} on {' '.join(map(str, facts))}"


def _open_other(other: Path, record: dict[str, object]) -> OtherOutput:
    report = Report(other)
    checkpoint = open_directory(other, report)
    schemes = check_description(checkpoint, report)
    check_tensors(checkpoint, schemes, report)
    check_hashes(checkpoint, record, report)
    if not report.ok:
        raise CheckpointError(f"{other}: {report.findings[0].line()}", "verify the other checkpoint first")
    return OtherOutput(checkpoint, schemes)
