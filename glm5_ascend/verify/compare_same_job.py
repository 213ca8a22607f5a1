"""Compare two outputs of one job: is a difference damage, or the arithmetic of the other machine?

The rule. A quantization is deterministic: equal inputs (source, recipe, calibration texts, seed, version of this tool)
on an equal build (torch, instruction set, device) give equal bytes, and every output records the hashes of its files.

    a file's bytes are not the recorded ones      damage or edited since: error (file_hashes.py)
    other inputs                                  not the same job: error
    equal inputs, equal build, other hashes       one of the two runs went wrong: error, by file
    equal inputs, other build, other hashes       another instruction set rounds sums in another order: warning, with
                                                  the number of integers that differ ...
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

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME, FLOAT, W4A8_DYNAMIC, dequantize
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.compare_source import compare_weights
from glm5_ascend.verify.derived_tensors import read_linear
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.expected_weight import ExpectedWeights, NoRotation
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
    _compare_tokenizers(checked.provenance, theirs, other, report)
    names, differ = _differing_files(checked.provenance, theirs, report)
    if not differ:
        return
    ours_built, theirs_built = _build(checked.provenance), _build(theirs)
    if ours_built == theirs_built:
        for name in differ:
            report.error(
                "twin.differs",
                f"other bytes than in {other}, although both were made by {ours_built}",
                file=name,
                fix="one of the two runs went wrong: quantize again (or the sources differ: only headers are recorded)",
            )
        return
    summary = f"{len(differ)} of {len(names)} files differ from {other}, made by {theirs_built}, here {ours_built}"
    _compare_builds(checked, second, summary, report)


def _same_job(ours: dict[str, Any], theirs: dict[str, Any], other: Path, report: Report) -> bool:
    """Return True if both were made from equal inputs; report it if not."""
    changed = [
        key for key in ("tool", "source", "recipe", "calibration", "seed") if _input(ours, key) != _input(theirs, key)
    ]
    if changed or not ours:
        report.error(
            "twin.inputs",
            f"not the same job as {other}: " + (f"other {', '.join(changed)}" if ours else "no provenance here"),
            file=PROVENANCE_NAME,
            fix="compare outputs of one source, recipe, calibration text and seed",
        )
    return not changed and bool(ours)


def _compare_tokenizers(ours: dict[str, Any], theirs: dict[str, Any], other: Path, report: Report) -> None:
    """Compare tokenizer files: they are copies, and equal on every build."""
    mine, its = ours.get("outputs"), theirs.get("outputs")
    if not isinstance(mine, dict) or not isinstance(its, dict):
        return  # reported below
    for name in sorted(name for name in mine.keys() | its.keys() if is_tokenizer_file(name)):
        if mine.get(name) != its.get(name):
            report.error(
                "twin.inputs",
                f"not the tokenizer of {other}, although both are copies of their source's",
                file=name,
                fix="compare outputs of one source",
            )


def _differing_files(ours: dict[str, Any], theirs: dict[str, Any], report: Report) -> tuple[list[str], list[str]]:
    """Return all recorded files of the format, and those whose hashes differ."""
    mine, its = ours.get("outputs"), theirs.get("outputs")
    if not isinstance(mine, dict) or not isinstance(its, dict):
        report.error("twin.inputs", "no hashes recorded in one of the two", file=PROVENANCE_NAME, fix="quantize again")
        return [], []
    names = sorted(name for name in mine.keys() | its.keys() if is_format_file(name))
    return names, [name for name in names if mine.get(name) != its.get(name)]


def _compare_builds(checked: Checked, second: _DequantizedCheckpoint | None, summary: str, report: Report) -> None:
    """Two builds made other bytes of equal inputs: count the integers, and report weights whose value differs."""
    if second is None:
        report.warning(
            "twin.build",
            f"{summary}: another instruction set rounds sums in another order",
            file=PROVENANCE_NAME,
            fix="give the other checkpoint's directory to count the integers that differ, or the source to check all",
        )
        return
    report.warning(
        "twin.build",
        f"{summary}: {_count_integers(checked.checkpoint, second.files)}",
        file=PROVENANCE_NAME,
        fix="expected between machines; the same build gives the same bytes",
    )
    compare_weights(checked, ExpectedWeights(second, checked.checkpoint, NoRotation()), report)


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


class _DequantizedCheckpoint:
    """The dequantized weights of a checkpoint, in the basis of its file."""

    def __init__(self, files: LoadedCheckpoint, schemes: dict[str, str]) -> None:
        self.files, self.schemes = files, schemes

    def resolve(self, name: str) -> str:
        """Return the name: an output stores every tensor."""
        return name

    def read(self, name: str) -> torch.Tensor:
        """Read a float tensor, or dequantize the weight [N, K] of a linear: fp32."""
        module = name.removesuffix(".weight")
        scheme = self.schemes.get(module, FLOAT)
        if scheme == FLOAT:
            return self.files.read(name).float()
        return dequantize(scheme, read_linear(self.files, module, scheme))


def _open_other(other: Path, record: dict[str, object]) -> _DequantizedCheckpoint:
    report = Report(other)
    checkpoint = open_directory(other, report)
    schemes = check_description(checkpoint, report)
    check_tensors(checkpoint, schemes, report)
    check_hashes(checkpoint, record, report)
    if not report.ok:
        raise CheckpointError(f"{other}: {report.findings[0].line()}", "verify the other checkpoint first")
    return _DequantizedCheckpoint(checkpoint, schemes)


def _count_integers(a: LoadedCheckpoint, b: LoadedCheckpoint) -> str:
    """Describe how many integers of the weights differ, and by how much."""
    total = changed = furthest = 0
    for name, entry in a.entries.items():
        if entry.dtype is not torch.int8 or b.entries.get(name) is None or b.entries[name].shape != entry.shape:
            continue
        packed = (a.description or {}).get(name) == W4A8_DYNAMIC
        for mine, its in zip(a.pieces(name), b.pieces(name), strict=True):
            halves = [(mine >> 4, its >> 4), ((mine << 4) >> 4, (its << 4) >> 4)] if packed else [(mine, its)]
            for x, y in halves:
                distance = (x.to(torch.int16) - y.to(torch.int16)).abs()
                total, changed = total + len(x), changed + int(distance.count_nonzero())
                furthest = max(furthest, int(distance.max()))
    return f"{changed} of {total} integers differ, by at most {furthest} step{'s' * (furthest != 1)}"
